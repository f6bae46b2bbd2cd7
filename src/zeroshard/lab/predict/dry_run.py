"""Dry run: trains as one rank of a world of any size, alone on this machine, and measures its memory and traffic.

The engine is the real one, over `NullCommunicator`: every buffer is allocated and written, forward and backward are
computed, and no data is sent. Each operation's allocations are recorded (`zeroshard.profiling.memory`).

On the meta device tensors have no values and take no memory, so a rank of any of our models runs in seconds. Engine,
model, autograd and optimizer are the same there, so bytes and collectives are the same; only times are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.comm import CONTROL, CommRecord, NullCommunicator, ObservedCommunicator
from zeroshard.lab.predict.model_trace import Inputs
from zeroshard.lab.predict.on_meta import compute_as_on_cpu, serves_step
from zeroshard.models import LanguageModel
from zeroshard.profiling.memory import AllocationRecorder
from zeroshard.zero import MixedPrecision, ShardingStrategy, Zero, loaded_later
from zeroshard.zero.buffers.layout import ROUND_BY_PLACE
from zeroshard.zero.engine import Accumulate

NUM_STEPS = 2  # the first step creates optimizer states; the second starts with the gradient buffers of the first


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank.

    Attributes:
        start: resident bytes by category before the first step.
        before_update, after_update: resident bytes by category before and after the update of the last step.
        peak_bytes: peak of live bytes: training state, activations and everything else.
        peak_by_category: the peak by category; empty unless allocations were recorded.
        messages: collectives of the last step in order, without control messages.
        step_s: seconds of each step but the first, including the recorder's own time; empty on the meta device.
    """

    start: dict[str, int]
    before_update: dict[str, int]
    after_update: dict[str, int]
    peak_bytes: int
    peak_by_category: dict[str, int]
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
    leaves: int | None = None,
    rank: int = 0,
    device: torch.device | str = "cpu",
    num_steps: int | None = None,
    record: bool = True,
) -> Measured:
    """Train ``model`` as rank ``rank`` of ``world_size`` and measure it.

    Args:
        model: the model; it is sharded in place. Parameters on the meta device get small random values.
        inputs: makes the arguments of a micro-batch.
        world_size, rank: size of the simulated world, and this process's rank in it.
        strategy, units, precision, accumulate, prefetch, shard_size, leaves: as `zeroshard.Zero` takes them.
        micro_batch, num_micro: rows of a micro-batch, and micro-batches of a step.
        optimizer: makes the optimizers; None: fused `torch.optim.AdamW` over all parameters.
        device: where the rank runs; ``"meta"``: without values, with the CPU's kernels and layout.
        num_steps: 2 or more; None: 2 on the meta device, else 3, of which the last two are timed.
        record: whether to record allocations; if not, ``peak_bytes`` is CUDA's own count, and 0 on a CPU.

    Raises:
        ValueError: ``num_steps`` is below 2; or ``device`` is ``"meta"``, and the model is not one of ours, is not on
            the meta device, masks documents, or ``optimizer`` is given.
    """
    device = torch.device(device)
    if device.type == "meta":
        optimizer = _prepare_without_values(model, optimizer)
    if num_steps is None:
        num_steps = NUM_STEPS if device.type == "meta" else NUM_STEPS + 1
    if num_steps < NUM_STEPS:
        raise ValueError(
            f"num_steps: {num_steps} steps; give at least {NUM_STEPS}, as the first one is not like the rest"
        )
    comm = ObservedCommunicator(NullCommunicator(world_size, rank))
    how = {"units": units, "precision": precision, "prefetch": prefetch, "accumulate": accumulate}
    zero = _engine(model, strategy, comm, device, shard_size=shard_size, leaves=leaves, **how)
    make = optimizer or (lambda zero: [zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)])
    optimizers = make(zero)
    given = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs(micro_batch))
    recorder = _recorder(zero, model, optimizers[0], device) if record else None
    return _measured(zero, comm, model, optimizers, given, num_micro, num_steps, device, recorder)


def _engine(
    model: nn.Module, strategy: ShardingStrategy, comm: ObservedCommunicator, device: torch.device, **how: Any
) -> Zero:
    """Wrap ``model`` in the engine; its weights have values afterwards unless ``device`` is the meta device."""
    unset = any(param.is_meta for param in model.parameters())
    with _laid_out_as_on_cpu() if device.type == "meta" else nullcontext():
        zero = Zero(model, strategy, comm=comm, device=device, init=loaded_later if unset else None, **how)
    if unset and device.type != "meta":
        _fill(zero)
    return zero


def _measured(
    zero: Zero,
    comm: ObservedCommunicator,
    model: nn.Module,
    optimizers: list[Optimizer],
    given: tuple[Any, ...],
    num_micro: int,
    num_steps: int,
    device: torch.device,
    recorder: AllocationRecorder | None,
) -> Measured:
    """Run the steps and measure them; ``recorder`` records allocations (None: they are not recorded)."""
    start = before_update = after_update = zero.memory_bytes()
    seconds: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with recorder or nullcontext():
        for _ in range(num_steps):
            comm.drain()
            began = time.perf_counter()
            before_update, after_update = _take_step(zero, model, optimizers, given, num_micro)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
    peak, by_category = _peak(recorder, device)
    sent = [each for each in comm.records if each.scope != CONTROL]
    timed = [] if device.type == "meta" else seconds[1:]
    return Measured(start, before_update, after_update, peak, by_category, sent, timed)


def _recorder(zero: Zero, model: nn.Module, optimizer: Optimizer, device: torch.device) -> AllocationRecorder:
    """Make the recorder of allocations. It ignores the placeholder scalars that parameters show while their weights are
    hidden, because the engine reads them only if they have values.
    """
    recorder = AllocationRecorder(zero.holdings, without_values=device.type == "meta")
    recorder.ignore(group.params.shown.placeholder for unit in zero.units for group in unit.groups)
    return recorder.follow(model, optimizer)


def _prepare_without_values(model: nn.Module, optimizer: object) -> Callable[[Zero], list[Optimizer]]:
    """Make ``model`` run the CPU's operations on the meta device; returns a function that makes its optimizers.

    Errors are those of `dry_run`.
    """
    if not serves_step(model) or not all(param.is_meta for param in model.parameters()):
        what = f"a {type(model).__name__} is not known to step on meta as on the CPU"
        raise ValueError(f"device: {what}; give the latter")
    if optimizer is not None:
        raise ValueError("optimizer: on the meta device fused AdamW is known alone; leave it out")
    assert isinstance(model, LanguageModel)
    compute_as_on_cpu(model)
    return _adamw_on_meta


@contextmanager
def _laid_out_as_on_cpu() -> Generator[None]:
    token = ROUND_BY_PLACE.set(ROUND_BY_PLACE.get() | {"meta"})
    try:
        yield
    finally:
        ROUND_BY_PLACE.reset(token)


def _adamw_on_meta(zero: Zero) -> list[Optimizer]:
    """Fused AdamW on meta tensors: torch supports it, except that a check before it creates a state must be skipped."""
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    make_states = optimizer._init_group  # ty: ignore[missing-attribute]

    def unchecked(group: dict[str, Any], *into: list[Any]) -> bool:
        return make_states({**group, "fused": None, "capturable": True}, *into)

    optimizer._init_group = unchecked  # ty: ignore[missing-attribute]
    return [optimizer]


def _peak(recorder: AllocationRecorder | None, device: torch.device) -> tuple[int, dict[str, int]]:
    """Peak of live bytes, in total and by category; the latter is empty unless allocations were recorded."""
    if recorder is not None:
        recorder.remove()
        return recorder.peak.num_bytes, dict(recorder.peak.by_category)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0, {}


def _take_step(
    zero: Zero, model: nn.Module, optimizers: list[Optimizer], given: tuple[Any, ...], num_micro: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Run forward, backward and update; returns the resident bytes before and after the update."""
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
    return before_update, after_update


def _loss(model: nn.Module, given: tuple[Any, ...]) -> Tensor:
    output = model(*given)
    loss = sum(leaf.sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)
    assert isinstance(loss, Tensor), "no output of the model takes gradients"
    return loss


def _fill(zero: Zero) -> None:
    """Fill weights that were never initialised with small random values."""
    with torch.no_grad():
        for holding in zero.holdings():
            if holding.tensor.untyped_storage().nbytes():  # otherwise it is freed until its next use
                holding.tensor.normal_(0.0, 0.02)
