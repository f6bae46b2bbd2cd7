"""What the command line's fuzzer starts from: good files of every kind that a verb reads, and ways to spoil them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from run_folders import write_run, write_sweep
from zeroshard.cli import main
from zeroshard.lab.predict.hardware import this_machine, write_calibration
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.loop import run_training

NANOGPT = (
    "n_layer = 2\nn_head = 2\nn_embd = 4 * n_head\nbatch_size = 8\nlearning_rate = 1e-3\ndataset = 'shakespeare'\n"
)
DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "mics_shard_size": 2},
    "gradient_clipping": 1.0,
    "wandb": {"enabled": True, "project": "p"},
}
SETTINGS = """\
strategy = "zero3"
seq_len = 16
max_steps = 30
warmup_steps = 3
lr = 3e-4
[model]
name = "gpt2-demo"
n_layer = 1
[data]
source = "synthetic"
max_tokens = 5000
[link]
mode = "simulated"
bandwidth = "1Gbit/s"
"""
SWEEP = """\
repeats = 2
[base]
max_steps = 30
[axes]
strategy = ["zero0", "zero3"]
"model.n_layer" = [1, 2]
size = [{ n_embd = 16 }, { "model.n_embd" = 32, seq_len = 8 }]
"""
# What replaces a value: of another type, beyond what types hold, and what no type expects.
EDGES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**70), 10**400, 0.0, -0.5, 1e-320, 1e308, float("inf")),
    *("trap:config", "this:s", "hf:trap"),
    *(float("nan"), "", "x", "a\0b", "\ud800", "9" * 5000, "../..", "/", "é" * 300, [], [1], {}, {"a": 1}, [[[]]], "4"),
)
EDGES_AS_TOML = (
    *("true", "0", "-1", "3", "2147483648", "9223372036854775808", "9" * 400, "9" * 5000, "0x" + "f" * 5000, "1e400"),
    *("nan", "-inf", '""', '"x"', '"a\\u0000b"', '"\\u202e\\u001b[31m"', "[]", "[1]", "{}", "{a = 1}", "1979-05-27"),
    *('"trap:config"', '"this:s"', '"hf:trap"'),
    *("[" * 3000, "07:32:00", "'../..'", "[[1], [2]]", '["a", "b"]', '"1Gbit/s"', '"9e99"', "1_0", "+1", "", "="),
)


@dataclass(frozen=True)
class ReportContents:
    """Good files, by what they are; a case copies what it spoils."""

    folder: Path

    @property
    def run(self) -> Path:
        """Of the trainer, with a checkpoint and its tokenizer."""
        return self.folder / "run"

    @property
    def hf(self) -> Path:
        """That run's model as Hugging Face's `transformers` would have written it."""
        return self.folder / "hf"

    @property
    def sweep(self) -> Path:
        """Of two cases, all done."""
        return self.folder / "sweep"


def make_material(folder: Path) -> ReportContents:
    """Train for a step, export, and write the other files by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("to be or not to be\n" * 100)
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": f"document {n} " * 20}) + "\n" for n in range(20)))
    config = TrainConfig.model_validate(
        {
            "model": {"name": "gpt2-demo", "n_layer": 1, "n_embd": 8, "n_head": 2, "seq_len": 16},
            "data": {"source": "text", "path": (str(text),), "dir": str(folder / "tokens")},
            "strategy": "zero0",
            "device": "cpu",
            "seq_len": 16,
            "micro_batch_size": 2,
            "max_steps": 1,
            "warmup_steps": 0,
            "eval_batches": 1,
            "out": str(folder / "run"),
        }
    )
    assert run_training(config) == 0
    assert main(["export", str(folder / "run"), str(folder / "hf")]) == 0
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "vocab_size": 256, "bias": True, "dropout": 0.0}
    torch.save({"model": _nanogpt_weights(folder / "run"), "model_args": sizes}, folder / "ckpt.pt")
    (folder / "nanogpt.py").write_text(NANOGPT)
    (folder / "deepspeed.json").write_text(json.dumps(DEEPSPEED))
    (folder / "settings.toml").write_text(SETTINGS)
    (folder / "sweep.toml").write_text(SWEEP)
    write_calibration(folder / "device.json", this_machine(2**34, "cpu"))
    write_run(folder / "finished")
    write_sweep(folder / "sweep", bandwidths=("1Gbit/s",), num_steps=3)
    return ReportContents(folder)


def _nanogpt_weights(run: Path) -> dict[str, torch.Tensor]:
    from zeroshard.inference.generate import load_for_text

    model, _ = load_for_text(run)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {f"transformer.{name.replace('blocks.', 'h.')}": tensor for name, tensor in weights.items()}


# -- spoiling --------------------------------------------------------------------------------------------------------


def spoil(path: Path, rng: random.Random) -> None:
    """Change a file, or one below a folder, into what nobody would write."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file())
        if not files:
            return
        path = rng.choice(files)
    if not path.is_file():
        return  # gone already
    ways: list[Callable[[Path, random.Random], None]] = [_bytes, _bytes, _gone]
    if path.suffix == ".json":
        ways += [_json] * 8
    elif path.suffix == ".jsonl":
        ways += [_json_line] * 8
    elif path.suffix in (".toml", ".py"):
        ways += [_assignment] * 8
    elif path.suffix == ".pt":
        ways += [_pickle] * 8
    rng.choice(ways)(path, rng)


def _bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    match rng.randrange(5):
        case 0:
            del data[rng.randrange(len(data) + 1) :]
        case 1 if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 2:
            data[rng.randrange(len(data) + 1) : 0] = rng.randbytes(rng.choice((1, 8, 100)))
        case 3:
            data[:] = rng.choice(
                (b"", b"\xff\xfe", b"[" * 100_000, b"{}", b"null", b"[]", b'"x"', b"\0" * 64, b"1e999")
            )
        case _:
            data[rng.randrange(len(data) + 1) : 0] = rng.choice((b"\xff", b"\0", b"\n\n", b"}", b'"', b"[[[", b"=\n"))
    path.write_bytes(data)


def _gone(path: Path, rng: random.Random) -> None:
    path.unlink()
    if rng.random() < 0.5:
        path.mkdir()


def _json(path: Path, rng: random.Random) -> None:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return
    path.write_text(json.dumps(spoiled(found, rng)))


def _json_line(path: Path, rng: random.Random) -> None:
    lines = path.read_text(errors="replace").splitlines() or ["{}"]
    at = rng.randrange(len(lines))
    try:
        found = json.loads(lines[at])
    except (ValueError, RecursionError):
        return
    lines[at] = json.dumps(spoiled(found, rng)).replace("Infinity", rng.choice(("1e999", "Infinity")))
    path.write_text("\n".join(lines) + rng.choice(("\n", "", "{")))


def spoiled(found: Any, rng: random.Random) -> Any:
    """A value as JSON has it, with one of its parts replaced, left out, or called by another name."""
    if not isinstance(found, dict | list) or not found or rng.random() < 0.1:
        return rng.choice(EDGES)
    key = rng.choice(list(found)) if isinstance(found, dict) else rng.randrange(len(found))
    if rng.random() < 0.1:
        del found[key]
    elif rng.random() < 0.05 and isinstance(found, dict):
        found[rng.choice(("", "x", "a.b", "\0", key * 2))] = found.pop(key)
    else:
        found[key] = spoiled(found[key], rng)
    return found


def _assignment(path: Path, rng: random.Random) -> None:
    """Replace what stands to the right of an equals sign, or a whole line."""
    lines = path.read_text(errors="replace").splitlines() or [""]
    at = rng.randrange(len(lines))
    edges = EDGES_AS_TOML if path.suffix == ".toml" else (*EDGES_AS_TOML, "None", "n_layer * n_layer", "9 ** 9 ** 9")
    match rng.randrange(6):
        case 0:
            lines.insert(
                at, rng.choice(("x = 1", "[a.b]", "[model]", "=", "[" * 2000, "seq_len = 1", '"" = 1', "n -= 1"))
            )
        case 1:
            del lines[at]
        case _:
            lines[at] = re.sub(r"=.*", lambda match: f"= {rng.choice(edges)}", lines[at])
    path.write_text("\n".join(lines))


def _pickle(path: Path, rng: random.Random) -> None:
    try:
        found = torch.load(path, weights_only=True)
    except Exception:  # noqa: BLE001 -- spoiled before: torch raises whatever its parts do
        return
    part = rng.choice(sorted(map(str, found)) or [""]) if isinstance(found, dict) else ""
    if not part:
        return
    if rng.random() < 0.1 or not isinstance(found[part], dict) or not found[part]:
        del found[part]
    else:
        table = found[part]
        key = rng.choice(list(table))
        others: tuple[Any, ...] = (
            None,
            "x",
            -1,
            2**40,
            2.5,
            [],
            torch.zeros(3),
            torch.zeros(2, dtype=torch.int64),
            True,
        )
        match rng.randrange(3):
            case 0:
                table[rng.choice((7, "", "x", None, key))] = table.pop(key)
            case 1:
                del table[key]
            case _:
                table[key] = rng.choice(others)
    torch.save(found, path)


def copied(path: Path, folder: Path) -> Path:
    """A copy of a file or folder, to be spoiled."""
    target = folder / path.name
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True)
    else:
        shutil.copyfile(path, target)
    return target
