"""Dry run: trains as one rank of a world of any size, alone on this machine, and measures its memory and traffic.

The engine is the real one, over `NullCommunicator`: every buffer is allocated and written, forward and backward are
computed, and no data is sent. Each operation's allocations are recorded (`zeroshard.train.profiling.memory`).
`compared` has
a plan's predictions beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.comm import CONTROL, CommRecord, NullCommunicator, ObservedCommunicator
from zeroshard.lab.planner.command import arguments, chosen_row
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.plan import plan
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.predict.hardware import Calibration, Device
from zeroshard.lab.predict.memory import HOST, SLOTS
from zeroshard.lab.predict.model_trace import Inputs
from zeroshard.models import LanguageModel, SequenceParallel
from zeroshard.train.profiling.memory import AllocationRecorder
from zeroshard.zero import FrozenFormat, MixedPrecision, Offload, ShardingStrategy, Zero, loaded_later
from zeroshard.zero.engine import Accumulate
from zeroshard.zero.offload.placement import HostGroup

NUM_STEPS = 2  # the first step creates optimizer states; the second starts with the gradient buffers of the first


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank."""

    start: dict[str, int]  # resident bytes by category before the first step
    # resident bytes by category before and after the update of each step
    updates: list[tuple[dict[str, int], dict[str, int]]]
    peak_bytes: int  # peak of live bytes: training state, activations and everything else
    peak_by_category: dict[str, int]  # the peak by category; empty unless allocations were recorded
    messages: list[CommRecord]  # collectives of the last step in order, without control messages
    # seconds of each step but the first, including the recorder's own time
    step_s: list[float] = field(default_factory=list)

    @property
    def before_update(self) -> dict[str, int]:
        """Resident bytes by category before the update of the last step."""
        return self.updates[-1][0]


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
    reproducible: int | None = None,
    offload: Offload | None = None,
    frozen_format: FrozenFormat | None = None,
    sequence_parallel: int = 1,
    rank: int = 0,
    device: torch.device | str = "cpu",
    num_steps: int = NUM_STEPS + 1,
    record: bool = True,
) -> Measured:
    """Train ``model`` as rank ``rank`` of ``world_size`` and measure it.

    Args:
        model: the model; it is sharded in place. Parameters on the meta device get small random values.
        inputs: makes the arguments of a micro-batch.
        world_size, rank: size of the simulated world, and this process's rank in it.
        strategy, units, precision, accumulate, prefetch, shard_size, reproducible, offload, frozen_format: as
            `zeroshard.Zero`.
        sequence_parallel: ranks that share each row of a `LanguageModel`; ``inputs`` makes a rank's part.
        micro_batch, num_micro: rows of a micro-batch, and micro-batches of a step.
        optimizer: makes the optimizers; None: fused `torch.optim.AdamW` over all parameters.
        device: where the rank runs.
        num_steps: `NUM_STEPS` or more; all but the first are timed.
        record: whether to record allocations; if not, ``peak_bytes`` is CUDA's own count, and 0 on a CPU.

    Raises:
        ValueError: ``num_steps`` is below `NUM_STEPS`.
    """
    device = torch.device(device)
    if num_steps < NUM_STEPS:
        raise ValueError(
            f"num_steps: {num_steps} steps; give at least {NUM_STEPS}, as the first one is not like the rest"
        )
    comm = ObservedCommunicator(NullCommunicator(world_size, rank))
    if sequence_parallel > 1:
        assert isinstance(model, LanguageModel)
        model.share_sequences(SequenceParallel.of(comm, sequence_parallel))
    unset = any(param.is_meta for param in model.parameters())
    zero = Zero(
        model,
        strategy,
        comm=comm,
        device=device,
        init=loaded_later if unset else None,
        units=units,
        precision=precision,
        prefetch=prefetch,
        accumulate=accumulate,
        shard_size=shard_size,
        reproducible=reproducible,
        offload=offload,
        frozen_format=frozen_format,
    )
    if unset:
        _fill(zero)
    _update_at_once(zero)
    make = optimizer or (lambda zero: [zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)])
    optimizers = make(zero)
    given = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs(micro_batch))
    return _measured(zero, comm, model, optimizers, given, num_micro, num_steps, record=record)


def _measured(
    zero: Zero,
    comm: ObservedCommunicator,
    model: nn.Module,
    optimizers: list[Optimizer],
    given: tuple[Any, ...],
    num_micro: int,
    num_steps: int,
    *,
    record: bool,
) -> Measured:
    """Take the steps, and measure each; ``given``: the arguments of a micro-batch, on the device."""
    device = zero.units[0].groups[0].params.full.device
    recorder = None
    if record:
        recorder = AllocationRecorder(zero.holdings, mapped=SLOTS not in zero.memory_bytes())
        # what parameters show while their weights are hidden
        recorder.ignore(group.params.placeholder for unit in zero.units for group in unit.groups)
        recorder.follow(model, optimizers[0])
    start, updates = zero.memory_bytes(), []
    seconds: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with recorder or nullcontext():
        for _ in range(num_steps):
            comm.drain()
            began = time.perf_counter()
            updates.append(_take_step(zero, model, optimizers, given, num_micro))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    by_category: dict[str, int] = {}
    if recorder is not None:
        recorder.remove()
        peak, by_category = recorder.peak.num_bytes, dict(recorder.peak.by_category)
        if SLOTS in updates[-1][1]:  # these the recorder does not see, and they are there at any time
            mapped = {name: updates[-1][1].get(name, 0) for name in (SLOTS, HOST["params"])}
            peak, by_category = peak + sum(mapped.values()), by_category | mapped
    sent = [each for each in comm.records if each.label != CONTROL]
    return Measured(start, updates, peak, by_category, sent, seconds[1:])


def _update_at_once(zero: Zero) -> None:
    """Have what is off the device updated on this thread: allocations of another one are not recorded."""
    for group in (group for unit in zero.units for group in unit.groups):
        if isinstance(group, HostGroup):
            group.update.executor.at_once = True


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
    """Fill weights that were never initialised with small random values, and codes with zeros."""
    with torch.no_grad():
        for holding in zero.holdings():
            if holding.tensor.dtype == torch.uint8:
                holding.tensor.zero_()
            elif holding.tensor.untyped_storage().nbytes():  # otherwise it is freed until its next use
                holding.tensor.normal_(0.0, 0.02)


def this_machine(memory_bytes: int, device_type: str) -> Calibration:
    """A device of the given memory whose rates are placeholders, for plans that predict only memory.

    Args:
        memory_bytes: bytes that a rank may use.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    rates = dict.fromkeys(("float32", "bfloat16", "float16"), 1e12)
    return Calibration(Device("this machine", memory_bytes, rates, 1e11, "a stand-in", device_type=device_type))


def compared(config: PlanConfig) -> dict[str, dict[str, int]]:
    """The step of one rank that ``config`` plans, taken here on a CPU: predicted and measured values by name."""
    planner = planner_for(**arguments(config))
    row = chosen_row(config, plan(**arguments(config), stage=int(config.stage), micro_batch=config.micro_batch))
    local = planner_for(**{**arguments(config), "gpu": this_machine(2**62, "cpu"), "within_node": config.network})
    again, workload = local.row(row.stage, row.micro_batch), local.workload
    with TemporaryDirectory(prefix="zeroshard-") as folder:
        offload = local.offload_at(local.strategy(row.stage, row.shard_size), row.shard_size)
        measured = dry_run(
            workload.model,
            workload.inputs,
            world_size=planner.cluster.world_size,
            strategy=local.strategy(row.stage, row.shard_size),
            micro_batch=row.micro_batch,
            units=workload.model.units,
            precision=workload.precision,
            num_micro=again.num_micro,
            offload=replace(offload, path=folder) if offload is not None and offload.path else offload,
            sequence_parallel=workload.sequence_parallel,
            prefetch=local.asked.prefetch,
            reproducible=local.asked.reproducible,
            frozen_format=workload.frozen_format,
        )
    step, sent = again.step, again.step.messages()
    lines = {"peak": (step.peak.total, measured.peak_bytes)}
    lines |= {name: (step.before_update[name], measured.before_update.get(name, 0)) for name in step.before_update}
    lines["messages"] = (len(sent), len(measured.messages))
    lines["message bytes"] = (sum(m.num_bytes for m in sent), sum(m.num_bytes for m in measured.messages))
    return {name: {"predicted": ours, "measured": theirs} for name, (ours, theirs) in lines.items()}
