"""Long sequences: bytes of activations at the peak by each way to recompute, planned beside measured, and their times.

    python benchmarks/claims/long_context.py                          # the table of depths in how-to/long-context.md
    python benchmarks/claims/long_context.py --lengths 1024 8192      # planned beside measured: a process a row
    python benchmarks/claims/long_context.py --time --seq-len 8192    # interleaved rounds: a quiet machine

Counted is all but weights, their gradients and inputs on the host. In the first table tensors have no values, so any
length is counted in seconds; sizes and lifetimes are those of a run on a CPU. In the second one forward and backward of
one sequence run, twice: the first makes what is made once (MKL's buffers, threads). Counted are torch's allocations
(`zeroshard.train.profiling.memory`, which plans share no code with) and private resident memory, less the slots on the
host.
Attention takes the square of the length in time.

Resident memory is divided by what malloc says of its heaps after each operation. Freed blocks stay there as long as a
later block above them is alive, and blocks of another size do not fit where they were: these pages are resident, but
nobody uses them. What is left is in use: it is compared with the plan. glibc gives freed blocks back at once if
``MALLOC_MMAP_THRESHOLD_=65536`` and ``MALLOC_TRIM_THRESHOLD_=65536`` are set, which costs page faults.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.host.columns import columns
from zeroshard.host.slab import room
from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.lab.predict.recorder import StorageEvents
from zeroshard.models import LanguageModel, LlamaConfig
from zeroshard.models.inputs_on_host import slot_bytes
from zeroshard.train.profiling.memory import AllocationRecorder
from zeroshard.zero import MixedPrecision

WAYS = [("none", "none"), ("full", "none"), ("offload", "none"), ("full", "auto"), ("offload", "auto")]
BESIDE = [("full", "none"), ("offload", "auto")]
VOCAB = 256


def config_of(given: argparse.Namespace, depth: int, how: str, tiles: str, seq_len: int) -> LlamaConfig:
    """The LLaMA of a row: heads of 64 numbers."""
    heads = max(given.width // 64, 1)
    config = LlamaConfig(VOCAB, seq_len, n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=given.width)
    return replace(config, activation_checkpointing=how, tiles=tiles)


def peak_bytes(config: LlamaConfig, seq_len: int) -> int:
    """Return the most bytes of activations that forward and backward of one sequence have at once, without values."""
    sizes, most = [0], [0]

    def changed(_storage: int, change: int) -> None:
        sizes[0] += change
        most[0] = max(most[0], sizes[0])

    with FakeTensorMode():
        model, tokens = config.build(), torch.zeros(1, seq_len, dtype=torch.int64)
        free_gradients(model)
        recorder = StorageEvents(changed, lambda *_: None)
        recorder.ignore([*model.parameters(), tokens])
        with recorder:
            model(tokens, tokens).backward()
    return most[0]


def free_gradients(model: LanguageModel) -> None:
    """Free each parameter's gradient when it is there, as an engine does that takes it."""

    def freed(param: Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(freed)


def planned_bytes(config: LlamaConfig, seq_len: int) -> int:
    """Return the most bytes of activations of the trace that a plan is made of."""
    with torch.device("meta"):
        model = config.build()
    return trace_language_model(model, 1, seq_len, MixedPrecision()).peak_bytes


class _Heaps(ctypes.Structure):
    """What ``mallinfo2`` returns: bytes of all of malloc's heaps."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


class Resident(TorchDispatchMode):
    """The most private memory of the process after any operation of this block, more than was in use at its beginning.

    Attributes:
        most: all that is resident, in bytes.
        in_use: the same without what malloc has free.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = _Heaps
        self._before = _status("RssAnon") - self._mallinfo().fordblks
        self.most = self.in_use = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look."""
        result = func(*args, **(kwargs or {}))
        grown = _status("RssAnon") - self._before
        self.most, self.in_use = max(self.most, grown), max(self.in_use, grown - self._mallinfo().fordblks)
        return result


def measured(config: LlamaConfig, seq_len: int) -> dict[str, int]:
    """Run forward and backward of one sequence; bytes by torch's allocations, of resident memory, and of the slots."""
    model = config.build()
    free_gradients(model)
    tokens = torch.randint(VOCAB, (1, seq_len))
    model(tokens, tokens).backward()
    gc.collect()
    for _ in range(2):  # what those who look make, they make once too
        recorder = AllocationRecorder(mapped=False)
        recorder.ignore([*model.parameters(), tokens])
        slots = slot_bytes()
        with Resident() as resident, recorder:
            model(tokens, tokens).backward()
        more = slot_bytes() - slots
        gc.collect()
    found = {"allocated": recorder.peak.num_bytes, "in_use": resident.in_use - more, "resident": resident.most - more}
    return {**found, "slots": slot_bytes()}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def lengths_table(given: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a row for each length and way: planned, allocated, resident and in use, all that is, and the slots."""
    mib = 2**20
    measures = ["allocated", "of it", "in use", "of it", "resident", "of it"]
    yield ["tokens", "recomputed", "tiles", "planned MiB", *measures, "slots", "s"]
    for seq_len in given.lengths:
        for how, tiles in BESIDE:
            config = config_of(given, given.layers[0], how, tiles, seq_len)
            planned = planned_bytes(config, seq_len)
            slots = (config.n_layer - 1) * room(seq_len * config.n_embd * 4) if how == "offload" else 0
            words = [sys.executable, __file__, "--one", how, tiles, str(seq_len), "--width", str(given.width)]
            began = time.perf_counter()
            out = subprocess.run(
                [*words, "--layers", str(given.layers[0])], check=True, capture_output=True, text=True
            ).stdout
            took, found = time.perf_counter() - began, json.loads(out)
            assert found["slots"] == slots, (found["slots"], slots)
            kinds = ("allocated", "in_use", "resident")
            beside = [text for kind in kinds for text in (f"{found[kind] / mib:.1f}", f"{found[kind] / planned:.3f}")]
            yield [
                *(f"{seq_len:,}", how, tiles, f"{planned / mib:.1f}", *beside),
                *(f"{slots / mib:.1f}", f"{took:.0f}"),
            ]


def depths_table(given: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a row for each depth and way."""
    yield ["blocks", "recomputed", "tiles", "numbers a token, in C", "of full"]
    for depth in given.layers:
        found = {way: peak_bytes(config_of(given, depth, *way, given.seq_len), given.seq_len) for way in WAYS}
        for (how, tiles), most in found.items():
            numbers = most / given.seq_len / given.width / 4
            yield [str(depth), how, tiles, f"{numbers:.1f}", f"{most / found['full', 'none']:.2f}"]


def times_table(given: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a row for each way: seconds of forward and backward in interleaved rounds, and the ratio to the first."""
    ways = [("full", "none"), ("offload", "none"), ("full", "auto"), ("offload", "auto")]
    models = [config_of(given, given.layers[0], *way, given.seq_len).build() for way in ways]
    tokens = torch.randint(VOCAB, (1, given.seq_len))
    taken: list[list[float]] = [[] for _ in ways]
    for turn in range(given.rounds + 1):
        for place in sorted(range(len(ways)), key=lambda each: (each + turn) % len(ways)):
            began = time.perf_counter()
            models[place](tokens, tokens).backward()
            if turn:  # the first round warms up
                taken[place].append(time.perf_counter() - began)
    yield ["recomputed", "tiles", "s", "of full, median of rounds", "quartiles"]
    for way, times in zip(ways, taken, strict=True):
        ratios = sorted(ours / full for ours, full in zip(times, taken[0], strict=True))
        quarters = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-len(ratios) // 4]:.3f}"
        yield [*way, f"{median(times):.3f}", f"{median(ratios):.3f}", quarters]


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=[])
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        how, tiles, seq_len = given.one
        print(json.dumps(measured(config_of(given, given.layers[0], how, tiles, int(seq_len)), int(seq_len))))
        return
    table = lengths_table if given.lengths else times_table if given.time else depths_table
    rows: list[list[str]] = []
    for row in table(given):
        rows.append(row)
        print("\t".join(row), file=sys.stderr, flush=True)  # as they come: long ones take minutes
    print("\n".join(columns(rows, right=range(3, len(rows[0])))))
    with suppress(OSError):
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
