"""A run's plan, and whether the run keeps it: what was predicted beside what was counted and measured.

Before the first step a planner (`zeroshard.lab`'s; the command line hands it in) says what this rank will hold between
a backward and its update, which collectives a step makes, how much memory the worst moment takes and how long a step
lasts. The first two follow from the engine's own table and layout, so they must be *equal*: a difference is a bug in
one of the two. The others are estimates, and are only reported.

[Note: Steps that are held to the plan]
    A plan is of a step that follows another. After an evaluation, or a step that was skipped, weights are not stale,
    and stages 1 and 2 gather none; before the first there was none. Such steps are not compared.
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
    """What a planner is told of one rank's part of a run.

    Attributes:
        model: on the meta device, with the kernels and the checkpointing of the run.
        row: of the stage table.
        rank, world_size: this rank and how many there are.
        shard_size: over how many neighbours state is sharded.
        compute_dtype: of forward and backward; masters are fp32.
        fp8: whether products of blocks are in 8 bits.
        num_micro: micro-batches of a step.
        reduce_dtype: in which gradients add up and travel; None: fp32.
        wire: what travels in another form: arguments of `zeroshard.zero.MixedPrecision`.
        accumulate, prefetch: as `zeroshard.Zero` takes them.
        micro_batch_size, seq_len: sequences in one, tokens in each.
        uniform_order: of the communicator.
        device_type: ``"cpu"`` or ``"cuda"``.
        keeps_ema: whether there is a moving average of the weights.
        saves_passes: whether the optimizer writes 16-bit weights beside their masters (`FusedAdamW`).
        calibration: path of a file of `zeroshard bench device`; empty: the device is known by name, or not at all.
        estimates: whether peak and time are wanted too: a second's work (a trace), which one rank does for all.
        local_steps: how replicas meet that take local steps; None: all ranks take each step together.
        leaves: as `zeroshard.Zero` takes them.
        links: what slows the ranks' way to each other, which was not there when the device was measured; None: nothing.
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
    """The fragments of replicas with local steps whose differences left, and arrived, at a step."""

    left: tuple[int, ...]
    arrived: tuple[int, ...]


class Sent(NamedTuple):
    """One collective: what plan and count have in common."""

    op: str
    num_bytes: int
    scope: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.op} of {self.num_bytes:,} bytes for {self.scope} over {self.world_size} ranks"


@dataclass(frozen=True)
class Planned:
    """What a rank should come to; None where nobody predicts.

    Attributes:
        memory_bytes: resident, by category, between a backward and its update, once the optimizer has its states.
        messages: a step's collectives, in order; without control messages.
        peak_bytes: at the worst moment of a step.
        step_s: of a step.
        leaving: by fragment of replicas with local steps, the collectives when its difference leaves.
        arriving: the same when it arrives: at stage 0 the anchors of a replica's ranks.
        why_no_peak: what kept the peak from being predicted; empty: nothing, or nobody tried.
    """

    memory_bytes: Mapping[str, int]
    messages: Sequence[Sent]
    peak_bytes: int | None = None
    step_s: float | None = None
    why_no_peak: str = ""
    leaving: Mapping[int, Sequence[Sent]] = field(default_factory=dict)
    arriving: Mapping[int, Sequence[Sent]] = field(default_factory=dict)

    def at(self, moves: Moves | None) -> Sequence[Sent]:
        """A step's collectives, with those of a meeting."""
        if moves is None:
            return self.messages
        left = [message for fragment in moves.left for message in self.leaving[fragment]]
        arrived = [message for fragment in moves.arrived for message in self.arriving[fragment]]
        at_once = moves.left == moves.arrived  # waited for where it leaves
        return [*self.messages, *left, *arrived] if at_once else [*self.messages, *arrived, *left]


Predict = Callable[[Job], Planned]


@dataclass
class Contract:
    """A plan, and how a run compares with it so far.

    Attributes:
        planned: what should come.
        enforce: whether a difference ends the run.
        num_checked: steps that were held to the plan: [Note: Steps that are held to the plan].
        num_broken: those of them that differed.
        difference: the first difference, in words; empty while there is none.
    """

    planned: Planned
    enforce: bool = False
    num_checked: int = 0
    num_broken: int = 0
    difference: str = ""
    memory_bytes: dict[str, int] = field(default_factory=dict)  # of the last step that was checked
    messages: list[Sent] = field(default_factory=list)
    expected: Sequence[Sent] | None = None  # of that step
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
        """Compare a step, number ``step`` from 1, of which this was sent and held on this rank."""
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
        """Something came between two steps."""
        self._follows = False

    def line(self) -> str:
        """The plan in one line."""
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
        """Predicted beside measured, as ``summary.json`` has it; null where one of the two is not known.

        Args:
            peak_bytes: measured, of this rank.
            step_s: measured: the median.
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
    """The first category that differs, in words; empty where none does."""
    for name in [*planned, *(measured.keys() - planned.keys())]:
        wanted, found = planned.get(name, 0), measured.get(name, 0)
        if wanted != found:
            return f"{name} holds {found:,} bytes, planned were {wanted:,}"
    return ""


def message_difference(planned: Sequence[Sent], measured: Sequence[Sent]) -> str:
    """The first message that differs, in words; empty where none does."""
    for index, (wanted, found) in enumerate(zip(planned, measured, strict=False)):
        if wanted != found:
            return f"message {index} is {found}, planned was {wanted}"
    if len(planned) != len(measured):
        longer, what = (measured, "beyond them") if len(measured) > len(planned) else (planned, "missing")
        first = longer[min(len(planned), len(measured))]
        return f"{len(measured)} messages were sent, planned were {len(planned)}; {what}: {first}"
    return ""


def _total(messages: Sequence[Sent], op: str, what: str) -> int:
    counted = Counter(message.op for message in messages)
    return counted[op] if what == "number" else sum(m.num_bytes for m in messages if m.op == op)


def _pair(planned: float | None, measured: float | None) -> dict[str, float | None]:
    ratio = measured / planned if planned and measured is not None else None
    return {"predicted": planned, "measured": measured, "ratio": ratio}


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}MiB"
