"""The blocks of memory that are live at the peak of a rank's step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import rows
import torch

from zeroshard.comm import NullCommunicator
from zeroshard.models import LanguageModel
from zeroshard.zero import Zero


def step_of_a_rank(
    name: str, checkpointing: str, stage: int, world: int, num_rows: int
) -> tuple[Callable[[], None], Zero, LanguageModel, torch.optim.Optimizer]:
    """A step of a rank without peers, and what it trains."""
    model = rows.gpt2(name, activation_checkpointing=checkpointing)
    zero = Zero(model, stage, units=model.units, comm=NullCommunicator(world), precision=rows.BF16)
    optimizer = zero.optimizer(torch.optim.AdamW, **rows.ADAMW, fused=True)
    tokens, targets = rows.batch(num_rows)

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, zero, model, optimizer


def blocks_of_cases(budget: rows.Budget, say: rows.Say) -> None:
    """Say what `blocks_at_peak` finds in the cases whose measured peaks lie furthest above the plan."""
    for case in _cases():
        keys = dict(zip(("model", "checkpointing", "stage", "world", "rows"), case, strict=True))
        if budget.spent():
            say(**keys, left_out="no time was left")
            continue
        with rows.losing_itself_alone(say, str(case)):
            step = step_of_a_rank(*case)[0]
            for _ in range(2):
                step()
            say(**keys, **blocks_at_peak(step))
            del step
        rows.cleared()


def _cases() -> list[tuple[str, str, int, int, int]]:
    """Model, checkpointing, stage, world size and rows."""
    if rows.TOY:
        return [("gpt2-124m", "full", 1, 8, 1)]
    small = [("gpt2-124m", "full", stage, world, 8) for stage, world in ((1, 64), (1, 8), (3, 64), (1, 1))]
    large = [("gpt2-1.5b", "full", 3, 64, 4), ("gpt2-1.5b", "full", 3, 8, 4), ("gpt2-1.5b", "full", 1, 1, 4)]
    return [*small, ("gpt2-124m", "none", 1, 1, 8), *large, ("gpt2-1.5b", "none", 1, 1, 4)]


def blocks_at_peak(step: Callable[[], None]) -> dict[str, Any]:
    """The peak of what tensors asked for, and of the allocator's blocks for them, and the largest blocks then."""
    if not rows.ON_GPU:
        step()
        return {}
    memory: Any = torch.cuda.memory
    gc.collect()
    torch.cuda.synchronize()
    held = {}  # what is live before the step has no entry in the history
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                held[block["address"]] = block["requested_size"]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    memory._record_memory_history(context="alloc", stacks="python", max_entries=500_000, clear_history=True)
    try:
        step()
        torch.cuda.synchronize()
        entries = memory._snapshot()["device_traces"][0]
    finally:
        memory._record_memory_history(enabled=None)
    stats = torch.cuda.memory_stats()
    peak, live = replayed(entries, held)
    blocks = sorted(live.values(), key=lambda block: -block[0])
    return {
        "requested_peak_bytes": stats["requested_bytes.all.peak"],
        "allocated_peak_bytes": stats["allocated_bytes.all.peak"],
        "requested_before_bytes": before["requested_bytes.all.current"],
        "allocated_before_bytes": before["allocated_bytes.all.current"],
        "replayed_peak_bytes": peak,
        "num_blocks": len(blocks),
        "blocks": [{"bytes": size, "by": by} for size, by in blocks if by][:60],
        "held": [size for size, by in blocks if not by][:60],
    }


def replayed(entries: Iterable[dict[str, Any]], held: dict[int, int]) -> tuple[int, dict[int, tuple[int, list[str]]]]:
    """The highest sum of live bytes in an allocator's history; the live blocks then, by address, with who made them.

    ``held``: bytes by address of the blocks that were live before.
    """
    live: dict[int, tuple[int, list[str]]] = {address: (size, []) for address, size in held.items()}
    now = peak = sum(held.values())
    at_peak = dict(live)
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = (entry["size"], _maker(entry))
            now += entry["size"]
            if now > peak:
                peak, at_peak = now, dict(live)
        elif entry["action"] == "free_requested":
            now -= live.pop(entry["addr"], (0, []))[0]
    return peak, at_peak


def _maker(entry: dict[str, Any]) -> list[str]:
    """The innermost Python frames that allocated, as ``file:line name``; the autograd engine's blocks may have few."""
    frames = [f"{Path(each['filename']).name}:{each['line']} {each['name']}" for each in entry.get("frames", [])
              if each["filename"].endswith(".py")]  # fmt: skip
    return frames[:4] or ["?"]
