"""A run, and manifests of its checkpoint that somebody has changed: the checksum is right, what it says is not.

A place anywhere in the manifest gets another value, is left out, doubled, or exchanged with its neighbour.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from fuzz_material import EDGES
from zeroshard.checkpoint.manifest_text import seal
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.loop import run_training

CHECKPOINT = "checkpoints/step-00000001"
TRAIN = "--device cpu --seq-len 16 --micro-batch-size 2 --max-steps 2 --warmup-steps 0 --eval-batches 1"
OURS = "--model gpt2-demo --model.n-layer 1 --model.n-embd 8 --model.n-head 2 --model.seq-len 16"
DATA = "--data text --data.path text.txt --data.dir tokens"
# Commands that read a checkpoint, in the folder of `make_run`.
READERS = (
    f"train {TRAIN} {OURS} {DATA} --out run --resume auto",
    f"train {TRAIN} {OURS} {DATA} --out run --resume auto --strategy zero2 --micro-batch-size 4 --ema-decay 0.5",
    f"train {TRAIN} {OURS} {DATA} --out run --resume run/{CHECKPOINT} --dtype float16",
    "train --config run/config.toml --resume auto --max-steps 3",
    f"train {TRAIN} {DATA} --out new --init-from run/{CHECKPOINT}",
    f"train {TRAIN} {OURS} {DATA} --out new --init-from run",
    "generate run --max-new-tokens 2",
    "generate run --max-new-tokens 2 --weights ema",
    "eval run --data-dir tokens --batches 1",
    "eval run --batches 1 --strategy zero3",
    "export run new",
    f"export run/{CHECKPOINT} new --weights ema",
    "checkpoint ls run",
    "checkpoint show run",
    f"checkpoint verify run/{CHECKPOINT}",
    "checkpoint diff spare run",
    "report run",
)
# A run with more to say in its checkpoints, and the command that resumes it.
MORE = {
    "data": {"source": "text", "path": ("docs.jsonl",), "streaming": True},
    "dtype": "float16",
    "ema_decay": 0.9,
    "optim": {"z_loss": 3.0},
}
RESUMES = ("train --config run/config.toml --resume auto --max-steps 2",)
# What a name in a manifest may be instead: of code, of another model, of what a terminal obeys.
NAMES: tuple[Any, ...] = (
    *("trap:config", "os:abort", "hf:theirs", "hf:", "gpt2-124m", "llama-tiny", "../x", "\x1b[2J", "x\nerror: y"),
    *("zero3", "fsdp2", "muon", "param", "exp_avg", "F32", "F64", "bfloat16", 2**31, 2**63 - 1, [4.0], [True], [-1]),
)


def make_run(folder: Path, **changes: Any) -> Path:
    """Train a run of one step on text: ``folder`` then has ``run``, ``tokens``, ``text.txt`` and ``docs.jsonl``."""
    (folder / "text.txt").write_text("to be or not to be\n" * 100)
    documents = ({"text": f"document {number} of the text that streams " * 8} for number in range(80))
    (folder / "docs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    config = TrainConfig.model_validate(
        {
            "model": {"name": "gpt2-demo", "n_layer": 1, "n_embd": 8, "n_head": 2, "seq_len": 16},
            "data": {"source": "text", "path": ("text.txt",), "dir": "tokens"},
            "strategy": "zero0",
            "device": "cpu",
            "seq_len": 16,
            "micro_batch_size": 2,
            "max_steps": 1,
            "warmup_steps": 0,
            "eval_batches": 1,
            "out": "run",
            **changes,
        }
    )
    with chdir(folder):
        assert run_training(config) == 0
    return folder


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says, without what `seal` adds."""
    facts = json.loads((checkpoint / "manifest.json").read_text())
    return {key: value for key, value in facts.items() if key not in ("format", "version", "sha256")}


def write_facts(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """Write a manifest with its checksum.

    Raises:
        ValueError: JSON cannot hold a value.
    """
    (checkpoint / "manifest.json").write_text("".join(seal(facts)))


def forged(facts: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy with one or two changes: half of them in ``extra``, which the run itself wrote."""
    found = json.loads(json.dumps(facts))
    for _ in range(rng.choice((1, 1, 2))):
        parts = [part for part in ("extra", "extra", "param_groups", "tensors", "files") if found.get(part)]
        part = rng.choice((*parts, ""))
        places = list(_places(found[part], (part,))) if part else [(key,) for key in found]
        if places:
            _change(found, rng.choice(places), rng)
    return found


def difference(facts: Any, others: Any, where: str = "") -> list[str]:
    """The places where two manifests differ, with both values."""
    if isinstance(facts, dict) and isinstance(others, dict):
        both = [(key, facts.get(key), others.get(key)) for key in {**facts, **others}]
    elif isinstance(facts, list) and isinstance(others, list) and len(facts) == len(others):
        both = list(zip(range(len(facts)), facts, others, strict=True))
    else:
        return [] if facts == others else [f"{where}: {str(facts)[:100]!a} became {str(others)[:100]!a}"]
    return [line for key, one, other in both for line in difference(one, other, f"{where}.{key}")]


def _places(facts: Any, where: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    inner = facts.items() if isinstance(facts, dict) else enumerate(facts) if isinstance(facts, list) else ()
    for key, value in inner:
        yield (*where, key)
        yield from _places(value, (*where, key))


def _change(facts: Any, where: tuple[Any, ...], rng: random.Random) -> None:
    for key in where[:-1]:
        facts = facts[key]
    last = where[-1]
    match rng.randrange(8):
        case 0:
            del facts[last]
        case 1 if isinstance(facts, list):
            facts.append(rng.choice((facts[last], *NAMES)))
        case 1:
            facts[rng.choice(("x", "\0", "shape", "step", "strategy"))] = rng.choice(NAMES)
        case 2:
            facts[last] = facts[rng.choice(list(facts) if isinstance(facts, dict) else range(len(facts)))]
        case 3 if type(facts[last]) is int:
            facts[last] += rng.choice((-1, 1))
        case 4 | 5:
            facts[last] = rng.choice(EDGES)
        case _:
            facts[last] = rng.choice(NAMES)
