"""Predicts one training step: the computation, collectives, waits and memory of one rank, in order.

Two recordings are merged. A trace of a micro-batch (`zeroshard.lab.predict.model_trace`) has what the model computes
and allocates between the events that its hooks report to the engine. A recording of the engine
(`zeroshard.lab.predict.engine`) has what the engine does at each of these events. Memory is then a running sum over the
merged step, and time comes from a simulation of it (`zeroshard.lab.predict.timeline`).

[Note: Many micro-batches]
    A backward ends by waiting for every collective that it issued, so no collective is in flight between two
    micro-batches of a step. The first micro-batch may refresh weights and the last may be the only one to reduce
    gradients. All others are alike, so one of them is recorded and stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeroshard.comm import CONTROL
from zeroshard.kernels.random_rounding import scratch_bytes
from zeroshard.lab.predict.actions import (
    CATEGORIES,
    Action,
    Compute,
    Issue,
    Message,
    Moment,
    Phase,
    Settings,
    Step,
    Wait,
)
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.engine import Change, EngineAction, recorded
from zeroshard.lab.predict.memory import (
    DISK,
    HOST,
    SLOTS,
    WIDE_BYTES,
    OptimizerState,
    RankBuffer,
    buffers_away,
    resident_bytes,
    watch_bytes,
)
from zeroshard.lab.predict.model_spans import ROOT, Event, Span, Trace
from zeroshard.lab.predict.work import Work, dtype_name
from zeroshard.models.ulysses import LABEL
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.state_formats.operands import most_at_once

__all__ = ["Settings", "Step", "step_of"]


def step_of(
    trace: Trace,
    buffers: Sequence[Buffer],
    settings: Settings,
    optimizer: OptimizerState,
    whole_optimizer: OptimizerState | None = None,
) -> Step:
    """Predict a step of one rank: the third step or a later one, when all states and buffers exist.

    Args:
        trace: the trace of a micro-batch.
        buffers: the model's flat buffers, root first, laid out for the ranks that shard together.
        settings: the engine's settings.
        optimizer: the optimizer's states.
        whole_optimizer: as `zeroshard.lab.predict.memory.resident_bytes` takes it.
    """
    resident = resident_bytes(buffers, settings, optimizer, whole_optimizer)
    num_taken = min(settings.num_micro, 3)  # [Note: Many micro-batches]
    syncs = tuple(settings.reduces_each_backward or micro == num_taken - 1 for micro in range(num_taken))
    events = tuple(span.event for span in trace.spans)
    actions = recorded(events, trace.units, tuple(buffers), replace(settings, num_micro=1, accumulate=None), syncs)
    other_bytes = watch_bytes(buffers, settings)
    ledger = _Ledger(resident, trace, on_cpu=settings.device_type == "cpu", other_bytes=other_bytes)
    parts = [ledger.micro_batch(trace.spans, actions[micro]) for micro in range(num_taken)]
    ledger.update(_update_bytes(buffers, optimizer, settings))
    return Step(
        first=parts[0] if num_taken > 1 else [],
        middle=parts[1] if num_taken > 2 else [],
        num_middle=max(settings.num_micro - 2, 0),
        last=parts[-1],
        update=list(_update(buffers, optimizer, settings)),
        peak=ledger.peak,
        start=_before_states(resident),
        before_update=resident,
        after_update=resident,
        tokens=trace.tokens * settings.num_micro,
        at_loss=ledger.at_loss,
    )


def _before_states(resident: dict[str, int]) -> dict[str, int]:
    """Resident bytes before the first step: gradients and optimizer states do not exist yet."""
    later, never = {"grads", "optimizer", HOST["grads"], DISK["grads"], SLOTS}, {HOST["optimizer"], DISK["optimizer"]}
    return {name: 0 if name in later else n for name, n in resident.items() if name not in never}


class _Ledger:
    """Records a rank's actions in order, and its live bytes by category after each."""

    def __init__(self, resident: dict[str, int], trace: Trace, *, on_cpu: bool = False, other_bytes: int = 0) -> None:
        """Start with the bytes that are resident between steps.

        ``resident``: these bytes by category; gradients are left out, because the engine's recording allocates them.
        ``other_bytes``: further ones, of no category.
        ``on_cpu``: whether memory of the host is that of the device.
        """
        self._bytes = dict.fromkeys(CATEGORIES, 0)
        kept = ("params", "master", "optimizer")
        # of a CPU the memory of the host is that of the device
        on_host = [each for each in (*map(HOST.__getitem__, kept), SLOTS) if on_cpu and each in resident]
        for category in (*kept, *on_host):
            self._bytes[category] = resident[category]
        self._bytes["others"] = trace.input_bytes + other_bytes
        self._live = sum(self._bytes.values())
        self._units = trace.units
        self.peak = Moment(dict(self._bytes), "")
        self.at_loss: Moment | None = None
        self._place = "root"
        self._phase: Phase = "forward"

    def micro_batch(self, spans: Sequence[Span], by_event: Sequence[Sequence[EngineAction]]) -> list[Action]:
        """Return the actions of a forward and a backward: at each event first the engine's, then the model's."""
        actions: list[Action] = []
        for span, done in zip(spans, by_event, strict=True):
            event = span.event
            if event.name != "exchange":
                self._place = "root" if event.unit == ROOT else self._units[event.unit]
            self._phase = _PHASES.get(event.name, self._phase)
            actions += self._tell(done)
            if event.name == "exchange":
                message = Message("all_to_all", event.num_bytes, *LABEL.split("/"), event.num_ranks)
                actions += [Issue(_EXCHANGE, message, sequence=True), Wait(_EXCHANGE)]
            highest = self._live + span.peak_kept + span.peak_temporary
            if highest > self.peak.total:
                self.peak = self._moment(span.peak_kept, span.peak_temporary)
            if event == _LOSS_IS_THERE and (self.at_loss is None or highest > self.at_loss.total):
                self.at_loss = self._moment(span.peak_kept, span.peak_temporary)
            self._bytes["activations"] += span.kept
            self._bytes["temporaries"] += span.temporary
            self._live += span.kept + span.temporary
            if span.work:
                actions.append(Compute(span.work))
            if event.name == "grad":  # Python takes it from autograd; on a GPU this is time of its host
                actions.append(Compute((_HOOK,)))
        return actions

    def update(self, temporary: int) -> None:
        """Account for the optimizer's step, which allocates ``temporary`` bytes for its duration."""
        self._place, self._phase = "root", "optimizer"
        if temporary and self._live + temporary > self.peak.total:
            self.peak = self._moment(0, temporary)

    def _tell(self, done: Sequence[EngineAction]) -> Iterator[Action]:
        for each in done:
            if isinstance(each, Change):
                self._change(each.category, each.num_bytes)
            else:
                yield Compute((each,)) if isinstance(each, Work) else each

    def _change(self, category: str, num_bytes: int) -> None:
        self._bytes[category] += num_bytes
        self._live += num_bytes
        if self._live > self.peak.total:
            self.peak = self._moment()

    def _moment(self, kept: int = 0, temporary: int = 0) -> Moment:
        found = dict(self._bytes)
        found["activations"] += kept
        found["temporaries"] += temporary
        return Moment(found, f"{self._phase} of {self._place}")


_EXCHANGE = -1  # the number of each: none begins before the one before it is over
_LOSS_IS_THERE = Event("pre_backward", ROOT)
_HOOK = Work(0, 0, "float32", num_hooks=1)
_PHASES: dict[str, Phase] = {"pre_forward": "forward", "pre_backward": "backward"}


def _update_bytes(buffers: Sequence[Buffer], optimizer: OptimizerState, settings: Settings) -> int:
    """Bytes that an update allocates: gradients copied to the master's dtype, and a chunk of widened states.

    Gradients are copied if they have another dtype: those of one buffer at a time, or of all (`OptimizerState.by_unit`)
    that are updated on the device.
    """
    here = _trained(buffers, settings, here=settings.device_type == "cuda")
    if optimizer.by_unit:
        found = [_copies_and_chunk(part, optimizer) for part in _trained(buffers, settings)]
        found += [_widened_bytes(part, optimizer) for part in here if optimizer.num_widened]
        return max(found, default=0)
    return sum(sum(_updated_numels(part)) * part.dtype.itemsize for part in here if _copied(part))


def _copies_and_chunk(part: RankBuffer, optimizer: OptimizerState) -> int:
    copies = part.updated_numel * part.dtype.itemsize if _copied(part) else 0
    numel = max(_updated_numels(part), default=0)
    return copies + optimizer.chunk_bytes(numel, part.dtype.itemsize, part.settings.device_type)


def _widened_bytes(part: RankBuffer, optimizer: OptimizerState) -> int:
    """Bytes of a part of a buffer's states, widened, and of copied gradients."""
    device_type = part.settings.device_type
    numels, most = _updated_numels(part), most_at_once(device_type)
    copies = sum(numels) * part.dtype.itemsize if _copied(part) else 0
    wide = min(sum(numels), most) * optimizer.num_widened * WIDE_BYTES  # beside those in fewer bits, which stay
    scratch = scratch_bytes(min(max(numels, default=0), most), device_type, codes=optimizer.block > 1)
    return copies + wide + (scratch if wide else 0)


def _updated_numels(part: RankBuffer) -> list[int]:
    """Elements of each piece of a buffer that this rank's optimizer updates; of tensors if it is replicated."""
    layout = part.layout
    pieces = layout.pieces(0, layout.padded_numel) if part.owner is None else layout.owned(part.owner)
    return [piece.numel for piece in pieces]


def _copied(part: RankBuffer) -> bool:
    """Whether an optimizer is shown copies of its gradients, because they have another dtype than the master."""
    return part.policy.reduced_dtype(part.dtype) != part.dtype


def _trained(buffers: Sequence[Buffer], settings: Settings, *, here: bool = False) -> list[RankBuffer]:
    """The trained buffers; ``here``: those alone that are updated on the device, or on the CPU, within the step."""
    away = buffers_away(buffers, settings.offload) if here else ()
    return [RankBuffer(buffer, settings) for buffer in buffers if buffer.trained and buffer.name not in away]


def _update(buffers: Sequence[Buffer], optimizer: OptimizerState, settings: Settings) -> Iterator[Action]:
    """Actions of the gradient norm, clipping and the optimizer's step."""
    num_shards = max((buffer.layout.world_size for buffer in buffers), default=1)
    shard_optim = settings.strategy.optim is SHARD and num_shards > 1
    trained = _trained(buffers, settings)

    def passes(num: int) -> Iterator[Compute]:
        for part in trained:
            yield Compute((Work(0, num * part.reduced_bytes, dtype_name(part.dtype)),))

    if settings.agrees:
        yield from _control(-1, "all_reduce", 24, num_shards * settings.num_replicas)
    if settings.clips:
        yield from passes(1)
        if trained and shard_optim:
            yield from _control(-2, "all_gather", 8 * (settings.reproducible or num_shards), num_shards)
        yield from passes(2)  # of gradients on the host, the factor is a part of the update
    # The update reads gradient, master and states, and writes all but the gradient.
    for part in _trained(buffers, settings, here=True):
        numel, master = part.updated_numel, part.dtype.itemsize
        reduced = part.policy.reduced_dtype(part.dtype).itemsize
        num_bytes = numel * (reduced + 2 * master + optimizer.step_bytes(master))
        if reduced != master:  # a wide copy is written, and read
            num_bytes += numel * 2 * master
        num_bytes *= optimizer.cpu_factor if settings.device_type == "cpu" else 1
        yield Compute((Work(0, round(num_bytes), dtype_name(part.dtype)),))


def _control(number: int, op: str, num_bytes: int, world_size: int) -> Iterator[Action]:
    if world_size > 1:
        message = Message(op, num_bytes, CONTROL, CONTROL, world_size)
        yield Issue(number, message, control=True)
        yield Wait(number)
