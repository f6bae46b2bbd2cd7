"""A rank of a world of any size, run for a few steps on this machine: what it holds and sends, measured.

The engine is the real one, over `NullCommunicator`: every buffer is allocated and written, forward and backward are
computed, and nothing travels. What it allocates is followed operation by operation (`zeroshard.lab.recorder`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.comm import CONTROL, CommRecord, NullCommunicator, ObservedCommunicator
from zeroshard.lab.recorder import AllocationRecorder
from zeroshard.lab.trace import Inputs
from zeroshard.zero import MixedPrecision, ShardingStrategy, Zero
from zeroshard.zero.engine import Accumulate

NUM_STEPS = 3  # the first makes states, the second finds gradient buffers of the first


@dataclass(frozen=True)
class Measured:
    """One rank, measured.

    Attributes:
        start, before_update, after_update: resident bytes by category at these points, of the last step.
        peak_bytes: the most that was live at once, training state, activations and all.
        messages: collectives of the last step in order, without control messages.
        step_s: wall time of each step, the first left out; the recorder's own share is in it.
    """

    start: dict[str, int]
    before_update: dict[str, int]
    after_update: dict[str, int]
    peak_bytes: int
    messages: list[CommRecord]
    step_s: list[float] = field(default_factory=list)


def dry_run(
    model: nn.Module,
    inputs: Inputs,
    *,
    world_size: int,
    strategy: ShardingStrategy,
    micro_batch: int,
    units: Iterable[nn.Module] | None = None,
    precision: MixedPrecision | None = None,
    optimizer: Callable[[Zero], list[Optimizer]] | None = None,
    num_micro: int = 1,
    accumulate: Accumulate | None = None,
    prefetch: int = 1,
    shard_size: int | None = None,
    rank: int = 0,
    device: torch.device | str = "cpu",
    num_steps: int = NUM_STEPS,
    record: bool = True,
) -> Measured:
    """Train ``model`` as rank ``rank`` of ``world_size`` and measure it.

    Args:
        model: taken over, and changed; parameters on the meta device get small random values.
        inputs: makes the arguments of a micro-batch.
        world_size, rank: of the world that is pretended.
        strategy, units, precision, accumulate, prefetch, shard_size: as `zeroshard.Zero` takes them.
        micro_batch, num_micro: rows, and how many such in a step.
        optimizer: makes the optimizers; None: fused `torch.optim.AdamW` over all parameters.
        device: where it runs.
        num_steps: 2 or more.
        record: whether to follow allocations; else ``peak_bytes`` is CUDA's own count, and 0 on a CPU.
    """
    device = torch.device(device)
    comm = ObservedCommunicator(NullCommunicator(world_size, rank))
    meta = any(param.is_meta for param in model.parameters())
    zero = Zero(
        model,
        strategy,
        units=units,
        comm=comm,
        precision=precision,
        init=_small if meta else None,
        prefetch=prefetch,
        accumulate=accumulate,
        device=device,
        shard_size=shard_size,
    )
    make = optimizer or (lambda zero: [zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)])
    optimizers = make(zero)
    given = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs(micro_batch))
    start = zero.memory_bytes()
    ledger = _Ledger(_storages(zero, given))
    seconds: list[float] = []
    before_update = after_update = start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    recorder = AllocationRecorder(ledger.heard) if record else None
    if recorder is not None:
        recorder.ignore([*model.buffers(), *(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))])
        recorder.watch(_flat(zero))
        recorder.__enter__()
    try:
        for step in range(num_steps):
            comm.drain()
            began = time.perf_counter()
            for micro in range(num_micro):
                with zero.micro_batch(last=micro == num_micro - 1):
                    _loss(model, given).backward()
            zero.clip_grad_norm_(1.0)
            before_update = zero.memory_bytes()
            for each in optimizers:
                each.step()
            after_update = zero.memory_bytes()
            for each in optimizers:
                each.zero_grad()
            if recorder is not None:
                recorder.poll()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if step:
                seconds.append(time.perf_counter() - began)
    finally:
        if recorder is not None:
            recorder.__exit__(None, None, None)
    peak = ledger.peak if recorder is not None else 0
    if recorder is None and device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    sent = [each for each in comm.records if each.scope != CONTROL]
    return Measured(start, before_update, after_update, peak, sent, seconds)


class _Ledger:
    def __init__(self, num_bytes: int) -> None:
        self.live = self.peak = num_bytes

    def heard(self, storage: int, change: int) -> None:
        self.live += change
        self.peak = max(self.peak, self.live)


def _loss(model: nn.Module, given: tuple[Any, ...]) -> Tensor:
    output = model(*given)
    loss = sum(leaf.sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
    assert isinstance(loss, Tensor), "no output of the model takes gradients"
    return loss


def _flat(zero: Zero) -> list[Tensor]:
    """The engine's own buffers of weights, each storage once."""
    found: dict[int, Tensor] = {}
    for unit in zero.units:
        for group in unit.groups:
            for tensor in (group.params.full, group.params.master):
                found.setdefault(tensor.untyped_storage()._cdata, tensor)
    return list(found.values())


def _storages(zero: Zero, given: tuple[Any, ...]) -> int:
    inputs = {leaf.untyped_storage()._cdata: leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
    return sum(tensor.untyped_storage().nbytes() for tensor in (*_flat(zero), *inputs.values()))


def _small(name: str, tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.normal_(0.0, 0.02)
