"""A run's plan (its contract): predicts memory, collectives and time, and compares each step with the prediction.

Before the first step a planner (from `zeroshard.lab`; the command line passes it in) predicts the resident memory of
this rank between a backward and its update, the collectives of a step, peak memory, and the time of a step. The first
two follow from the engine's stage table and buffer layout, so prediction and measurement must be *equal*: a difference
is a bug in one of them. The other two are estimates, and are only reported.

[Note: Steps that are held to the plan]
    A plan is for a step that directly follows a step that was taken. After an evaluation or a skipped step the
    unsharded weights are not stale, so stages 1 and 2 gather nothing; before the first step there is no update either.
    Such steps are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from zeroshard.comm import CONTROL, CommRecord
from zeroshard.models import LanguageModel
from zeroshard.train.setup.links import Links
from zeroshard.zero import LocalSteps, ShardingStrategy
from zeroshard.zero.engine import Accumulate


@dataclass(frozen=True)
class Job:
    """The facts that a planner needs about one rank's part of a run.

    Attributes:
        model: the model on the meta device, with the run's kernels and activation checkpointing.
        row: the strategy's row of the stage table.
        rank, world_size: this rank, and the number of ranks.
        shard_size: number of neighbouring ranks over which state is sharded.
        compute_dtype: dtype of forward and backward; the master weights are fp32.
        fp8: whether matrix products of the blocks are in 8 bits.
        num_micro: micro-batches of each rank in a step.
        reduce_dtype: dtype in which gradients accumulate and are reduced; None: fp32.
        wire: wire formats, as arguments of `zeroshard.zero.MixedPrecision`.
        accumulate, prefetch: as in `zeroshard.Zero`.
        micro_batch_size, seq_len: sequences in a micro-batch, tokens in a sequence.
        uniform_order: `Communicator.uniform_order` of the run's communicator.
        device_type: ``"cpu"`` or ``"cuda"``.
        keeps_ema: whether there is a moving average of the weights.
        saves_passes: whether the optimizer writes 16-bit weights together with the master weights (`FusedAdamW`).
        calibration: path of a file from `zeroshard bench device`; empty: the planner knows the device by name or not
            at all.
        estimates: whether to estimate peak memory and time too. That takes a trace of about a second, so one rank does
            it for all.
        local_steps: how replicas take local steps and meet; None: all ranks take each step together.
        leaves: as in `zeroshard.Zero`.
        links: slowed links between the ranks, which the device's calibration does not include; None: none.
    """

    model: LanguageModel
    row: ShardingStrategy
    rank: int
    world_size: int
    shard_size: int
    compute_dtype: torch.dtype
    num_micro: int
    micro_batch_size: int
    seq_len: int
    uniform_order: bool
    device_type: str
    keeps_ema: bool = False
    saves_passes: bool = False
    calibration: str = ""
    estimates: bool = True
    links: Links | None = None
    fp8: bool = False
    reduce_dtype: torch.dtype | None = None
    wire: Mapping[str, Any] = field(default_factory=dict)
    accumulate: Accumulate | None = None
    prefetch: int = 1
    local_steps: LocalSteps | None = None
    leaves: int | None = None


class Moves(NamedTuple):
    """The fragments (with local steps) whose differences were sent, and those taken in, at a step."""

    left: tuple[int, ...]
    arrived: tuple[int, ...]


class Sent(NamedTuple):
    """One collective, in the form in which planned and issued collectives are compared."""

    op: str
    num_bytes: int
    scope: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.op} of {self.num_bytes:,} bytes for {self.scope} over {self.world_size} ranks"


@dataclass(frozen=True)
class Planned:
    """The plan of one rank.

    Attributes:
        memory_bytes: resident bytes by category, between a backward and its update, once optimizer states exist.
        messages: the collectives of a step, in order, without control messages.
        peak_bytes: peak memory of a step; None if it is not predicted.
        step_s: seconds of a step; None if they are not predicted.
        leaving: with local steps, for each fragment the collectives with which its difference is sent.
        arriving: for each fragment the collectives that complete its difference when it is taken in; at stage 0 also
            the gather of the anchors among a replica's ranks.
        why_no_peak: why the peak could not be predicted; empty if it was, or was not asked for.
    """

    memory_bytes: Mapping[str, int]
    messages: Sequence[Sent]
    peak_bytes: int | None = None
    step_s: float | None = None
    why_no_peak: str = ""
    leaving: Mapping[int, Sequence[Sent]] = field(default_factory=dict)
    arriving: Mapping[int, Sequence[Sent]] = field(default_factory=dict)

    def at(self, moves: Moves | None) -> Sequence[Sent]:
        """Return a step's collectives, including those of a meeting, in order; ``moves``: what the meeting moves."""
        if moves is None:
            return self.messages
        left = [message for fragment in moves.left for message in self.leaving[fragment]]
        arrived = [message for fragment in moves.arrived for message in self.arriving[fragment]]
        at_once = moves.left == moves.arrived  # without overlap: sent first, then taken in at the same step
        return [*self.messages, *left, *arrived] if at_once else [*self.messages, *arrived, *left]


Predict = Callable[[Job], Planned]


@dataclass
class Contract:
    """A plan, and how the run compares with it so far.

    Attributes:
        planned: the plan.
        enforce: whether a difference ends the run.
        num_checked: number of steps compared with the plan: [Note: Steps that are held to the plan].
        num_broken: number of those steps that differed from it.
        difference: the first difference, in words; empty while there is none.
        memory_bytes, messages, expected: of the last step compared: measured memory, issued and planned collectives.
    """

    planned: Planned
    enforce: bool = False
    num_checked: int = 0
    num_broken: int = 0
    difference: str = ""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    messages: list[Sent] = field(default_factory=list)
    expected: Sequence[Sent] | None = None
    _follows: bool = False

    def see(
        self,
        step: int,
        records: Iterable[CommRecord],
        memory_bytes: Mapping[str, int],
        *,
        taken: bool,
        moves: Moves | None = None,
    ) -> None:
        """Compare step number ``step``, counted from 1, with the plan.

        Args:
            step: number of the step.
            records: the collectives that this rank issued.
            memory_bytes: resident bytes of this rank by category, before ``zero_grad``.
            taken: whether the step was taken; a skipped step is not compared, nor is the one after it.
            moves: fragments sent and taken in at the step; None without local steps.
        """
        follows, self._follows = self._follows, taken
        if not (follows and taken):
            return
        self.memory_bytes = dict(memory_bytes)
        self.messages = [Sent(r.op, r.num_bytes, r.scope, r.world_size) for r in records if r.scope != CONTROL]
        self.expected = self.planned.at(moves)
        self.num_checked += 1
        found = memory_difference(self.planned.memory_bytes, self.memory_bytes) or message_difference(
            self.expected, self.messages
        )
        self.num_broken += bool(found)
        if found and not self.difference:
            self.difference = f"step {step}: {found}"

    def interrupt(self) -> None:
        """Note that something, such as an evaluation, came between two steps: the next step is not compared."""
        self._follows = False

    def line(self) -> str:
        """Describe the plan in one line."""
        planned = self.planned
        held = sum(planned.memory_bytes.values())
        parts = ", ".join(f"{name} {_mib(n)}" for name, n in planned.memory_bytes.items() if n)
        sent = [message.num_bytes for message in planned.messages if message.world_size > 1]
        line = f"{_mib(held)} resident ({parts})"
        line += f", {len(sent)} collectives of {_mib(sum(sent))} a step" if sent else ""
        line += "" if planned.peak_bytes is None else f", peak {_mib(planned.peak_bytes)}"
        line += f", peak not predicted: {planned.why_no_peak}" if planned.why_no_peak else ""
        return line + ("" if planned.step_s is None else f", {planned.step_s * 1e3:.1f} ms a step")

    def report(self, peak_bytes: int | None, step_s: float | None) -> dict[str, Any]:
        """Return predicted and measured values side by side, for ``summary.json``; None if a value is not known.

        Args:
            peak_bytes: measured peak memory of this rank.
            step_s: measured median seconds of a step.
        """
        planned = self.planned
        categories = [*planned.memory_bytes, *(self.memory_bytes.keys() - planned.memory_bytes.keys())]
        expected = planned.messages if self.expected is None else self.expected
        ops = sorted({message.op for message in (*expected, *self.messages)})
        measured = self.num_checked > 0
        return {
            "num_checked": self.num_checked,
            "num_broken": self.num_broken,
            "difference": self.difference,
            "memory_bytes": {
                name: _pair(planned.memory_bytes.get(name, 0), self.memory_bytes.get(name, 0) if measured else None)
                for name in categories
            },
            "messages": {
                op: {
                    what: _pair(_total(expected, op, what), _total(self.messages, op, what))
                    if measured
                    else _pair(_total(expected, op, what), None)
                    for what in ("number", "bytes")
                }
                for op in ops
            },
            "peak_bytes": _pair(planned.peak_bytes, peak_bytes),
            "step_s": _pair(planned.step_s, step_s),
        }


def memory_difference(planned: Mapping[str, int], measured: Mapping[str, int]) -> str:
    """Describe the first category of memory that differs; empty if none does."""
    for name in [*planned, *(measured.keys() - planned.keys())]:
        wanted, found = planned.get(name, 0), measured.get(name, 0)
        if wanted != found:
            return f"{name} has {found:,} bytes resident, planned were {wanted:,}"
    return ""


def message_difference(planned: Sequence[Sent], measured: Sequence[Sent]) -> str:
    """Describe the first collective that differs; empty if none does."""
    for index, (wanted, found) in enumerate(zip(planned, measured, strict=False)):
        if wanted != found:
            return f"collective {index} is {found}, planned was {wanted}"
    if len(planned) != len(measured):
        longer, what = (measured, "beyond them") if len(measured) > len(planned) else (planned, "missing")
        first = longer[min(len(planned), len(measured))]
        return f"there were {len(measured)} collectives, planned were {len(planned)}; {what}: {first}"
    return ""


def _total(messages: Sequence[Sent], op: str, what: str) -> int:
    counted = Counter(message.op for message in messages)
    return counted[op] if what == "number" else sum(m.num_bytes for m in messages if m.op == op)


def _pair(planned: float | None, measured: float | None) -> dict[str, float | None]:
    ratio = measured / planned if planned and measured is not None else None
    return {"predicted": planned, "measured": measured, "ratio": ratio}


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}MiB"
