"""A rank of a world of any size, run for a few steps on this machine: what it holds and sends, measured.

The engine is the real one, over `NullCommunicator`: every buffer is allocated and written, forward and backward are
computed, and nothing travels. What it allocates is followed operation by operation (`zeroshard.profiling.memory`).

On the meta device tensors have no values and take no memory. There a rank of any model of ours is run in seconds: the
same engine, the same model, autograd and optimizer, and so the same bytes and messages, and no times.
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

NUM_STEPS = 3  # the first makes states, the second finds gradient buffers of the first


@dataclass(frozen=True)
class Measured:
    """One rank, measured.

    Attributes:
        start, before_update, after_update: resident bytes by category at these points, of the last step.
        peak_bytes: the most that was live at once, training state, activations and all.
        peak_by_category: of that, where allocations were followed.
        messages: collectives of the last step in order, without control messages.
        step_s: wall time of each step, the first left out; the recorder's own share is in it. None without values.
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
    num_steps: int = NUM_STEPS,
    record: bool = True,
) -> Measured:
    """Train ``model`` as rank ``rank`` of ``world_size`` and measure it.

    Args:
        model: taken over, and changed; parameters on the meta device get small random values.
        inputs: makes the arguments of a micro-batch.
        world_size, rank: of the world that is pretended.
        strategy, units, precision, accumulate, prefetch, shard_size, leaves: as `zeroshard.Zero` takes them.
        micro_batch, num_micro: rows, and how many such in a step.
        optimizer: makes the optimizers; None: fused `torch.optim.AdamW` over all parameters.
        device: where it runs; ``"meta"``: without values, as it would run on the CPU.
        num_steps: 2 or more.
        record: whether to follow allocations; else ``peak_bytes`` is CUDA's own count, and 0 on a CPU.

    Raises:
        ValueError: ``device`` is ``"meta"``, and the model is none of ours on it, has a mask of documents, or
            ``optimizer`` is given.
    """
    device = torch.device(device)
    if device.type == "meta":
        optimizer = _prepare_without_values(model, optimizer)
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
    """The engine around ``model``, whose weights have values unless ``device`` is the meta device."""
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
    """Take the steps and measure them; ``recorder`` follows allocations, where they are to be followed."""
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
    """Follows allocations; not the numbers that hidden weights show, which are looked at where there are values."""
    recorder = AllocationRecorder(zero.holdings, without_values=device.type == "meta")
    recorder.ignore(group.params.hidden for unit in zero.units for group in unit.groups)
    return recorder.follow(model, optimizer)


def _prepare_without_values(model: nn.Module, optimizer: object) -> Callable[[Zero], list[Optimizer]]:
    """Have ``model`` compute on the meta device as on the CPU; returns what makes its optimizer. Errors: `dry_run`."""
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
    """Fused AdamW, which torch knows for meta tensors too, but for the check before it makes a state."""
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    make_states = optimizer._init_group  # ty: ignore[missing-attribute]

    def unchecked(group: dict[str, Any], *into: list[Any]) -> bool:
        return make_states({**group, "fused": None, "capturable": True}, *into)

    optimizer._init_group = unchecked  # ty: ignore[missing-attribute]
    return [optimizer]


def _peak(recorder: AllocationRecorder | None, device: torch.device) -> tuple[int, dict[str, int]]:
    """The most bytes that were live at once, and by category where allocations were followed."""
    if recorder is not None:
        recorder.remove()
        return recorder.peak.num_bytes, dict(recorder.peak.by_category)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0, {}


def _take_step(
    zero: Zero, model: nn.Module, optimizers: list[Optimizer], given: tuple[Any, ...], num_micro: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Forward, backward and update; returns the resident bytes before the update and after it."""
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
    """Small numbers for weights that nobody has drawn."""
    with torch.no_grad():
        for holding in zero.holdings():
            if holding.tensor.untyped_storage().nbytes():  # else it is freed until it is used
                holding.tensor.normal_(0.0, 0.02)
