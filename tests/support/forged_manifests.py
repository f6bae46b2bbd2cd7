"""A run, and its checkpoint's manifest read and written with a checksum that is right, whatever it says."""

import json
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.manifest_text import seal
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.start import run_training

CHECKPOINT = "checkpoints/step-00000001"
TRAIN = "--device cpu --seq-len 16 --micro-batch-size 2 --max-steps 2 --warmup-steps 0 --eval-batches 1"
OURS = "--model gpt2-demo --model.n-layer 1 --model.n-embd 8 --model.n-head 2 --model.seq-len 16"
DATA = "--data text --data.path text.txt --data.dir tokens"


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
