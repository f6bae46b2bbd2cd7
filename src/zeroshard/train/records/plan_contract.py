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
from typing import Any, Literal, NamedTuple

import torch

from zeroshard.comm import CONTROL, CommRecord
from zeroshard.comm.links import Links
from zeroshard.models import LanguageModel
from zeroshard.models.ulysses import LABEL as EXCHANGED
from zeroshard.settings.engine import EngineSettings
from zeroshard.train.records.records import in_memory, is_on_disk
from zeroshard.zero import ShardingStrategy

DAY_S = 86_400


@dataclass(frozen=True)
class Job(EngineSettings):
    """The facts that a planner needs about one rank's part of a run, beside what its engine is asked for."""

    model: LanguageModel  # on the meta device, with the run's kernels and activation checkpointing
    row: ShardingStrategy
    rank: int
    world_size: int
    compute_dtype: torch.dtype  # of forward and backward; the master weights are fp32
    num_micro: int  # micro-batches of each rank in a step
    micro_batch_size: int
    seq_len: int
    uniform_order: bool  # `Communicator.uniform_order` of the run's communicator
    device_type: str
    compiled: Literal["", "compiled", "in pieces"] = ""  # what torch.compile makes of the model: one graph, or several
    keeps_ema: bool = False  # whether there is a moving average of the weights
    calibration: str = ""  # path of a file from `zeroshard bench device`
    estimates: bool = True  # peak memory and time too: a trace of about a second, which one rank does for all
    links: Links | None = None  # slowed links, which the device's calibration does not include
    reduce_dtype: torch.dtype | None = None  # in which gradients accumulate and are reduced; None: fp32
    wire: Mapping[str, Any] = field(default_factory=dict)  # arguments of `zeroshard.zero.MixedPrecision`
    sequence_parallel: int = 1  # ranks that share each sequence; ``seq_len`` is that of the whole one
    optimizer: str = "AdamW"  # a key of `zeroshard.lab.predict.memory.OPTIMIZER_STATES`
    free_bytes: int | None = None  # for which a fraction that is ``auto`` is chosen; None: it is all
    ranks_per_node: int = 1  # which share the host
    backend: str = ""  # the run's communicator, as `zeroshard.comm.registry` names it; empty: a user's own

    @property
    def num_sharding(self) -> int:
        """The number of neighbouring ranks over which state is sharded."""
        return self.shard_size or self.world_size


class Sent(NamedTuple):
    """One collective, in the form in which planned and issued collectives are compared."""

    op: str
    num_bytes: int
    label: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.op} of {self.num_bytes:,} bytes for {self.label} over {self.world_size} ranks"


@dataclass(frozen=True)
class Planned:
    """The plan of one rank."""

    memory_bytes: Mapping[str, int]  # resident, by category, between a backward and its update
    messages: Sequence[Sent]  # the collectives of a step, in order, without control messages
    peak_bytes: int | None = None
    step_s: float | None = None
    why_no_peak: str = ""  # why the peak could not be predicted
    fraction: float | None = None  # of the state that leaves the device, if the job's is to be chosen
    why_fraction: str = ""  # why that one, in words
    # with local steps: the collectives of each fragment's outer step
    outer_steps: Mapping[int, Sequence[Sent]] = field(default_factory=dict)
    # of ranks that share sequences, the all-to-alls of a step in order; None: they are not predicted for this rank
    exchanges: Sequence[Sent] | None = None
    file_bytes: int = 0  # of the rank's file of states, read once and written once for each step
    comm_bytes: int | None = None  # of the communicators' own buffers, beside the peak; None: they are not known

    def at(self, fragments: Sequence[int]) -> Sequence[Sent]:
        """Return the collectives of a step after which these fragments take an outer step, in order."""
        return [*self.messages, *(message for fragment in fragments for message in self.outer_steps[fragment])]


Predict = Callable[[Job], Planned]


@dataclass
class Contract:
    """A plan, and how the run compares with it so far."""

    planned: Planned
    enforce: bool = False  # whether a difference ends the run
    num_checked: int = 0  # steps compared with the plan: [Note: Steps that are held to the plan]
    num_broken: int = 0  # those that differed from it
    difference: str = ""  # the first difference, in words
    memory_bytes: dict[str, int] = field(default_factory=dict)  # measured at the last step compared
    messages: list[Sent] = field(default_factory=list)  # issued at the last step compared
    expected: Sequence[Sent] | None = None  # planned for the last step compared
    _follows: bool = False

    def compare(
        self,
        step: int,
        records: Iterable[CommRecord],
        memory_bytes: Mapping[str, int],
        *,
        taken: bool,
        fragments: Sequence[int] = (),
    ) -> None:
        """Compare step number ``step``, counted from 1, with the plan; a skipped step is not, nor the one after it.

        ``records`` are this rank's collectives, ``memory_bytes`` its resident bytes before ``zero_grad``,
        ``fragments`` those of the outer step after it.
        """
        follows, self._follows = self._follows, taken
        if not (follows and taken):
            return
        self.memory_bytes = dict(memory_bytes)
        sent = [Sent(r.op, r.num_bytes, r.label, r.world_size) for r in records if r.label != CONTROL]
        # all-to-alls inside of attention come between the engine's collectives, which have an order of their own
        exchanged = [each for each in sent if each.label == EXCHANGED]
        self.messages, self.expected = [each for each in sent if each.label != EXCHANGED], self.planned.at(fragments)
        self.num_checked += 1
        found = memory_difference(self.planned.memory_bytes, self.memory_bytes) or message_difference(
            self.expected, self.messages
        )
        if self.planned.exchanges is not None:
            found = found or message_difference(self.planned.exchanges, exchanged)
            self.messages, self.expected = [*self.messages, *exchanged], [*self.expected, *self.planned.exchanges]
        self.num_broken += bool(found)
        if found and not self.difference:
            self.difference = f"step {step}: {found}"

    def interrupt(self) -> None:
        """Note that something, such as an evaluation, came between two steps: the next step is not compared."""
        self._follows = False

    def line(self) -> str:
        """Describe the plan in one line."""
        planned = self.planned
        held = in_memory(planned.memory_bytes)
        parts = ", ".join(f"{name} {_mib(n)}" for name, n in planned.memory_bytes.items() if n and not is_on_disk(name))
        planned_messages = (*planned.messages, *(planned.exchanges or ()))
        sent = [message.num_bytes for message in planned_messages if message.world_size > 1]
        line = f"{_mib(held)} resident ({parts})"
        line += f", {len(sent)} collectives of {_mib(sum(sent))} a step" if sent else ""
        line += f", {_mib(planned.file_bytes)} in a file, written at each step" if planned.file_bytes else ""
        if planned.file_bytes and planned.step_s:
            line += f" (up to {planned.file_bytes * DAY_S / planned.step_s / 2**40:,.2f}TiB a day)"
        line += "" if planned.peak_bytes is None else f", peak {_mib(planned.peak_bytes)}"
        line += f", buffers of communicators {_mib(planned.comm_bytes)}" if planned.comm_bytes else ""
        line += f", peak not predicted: {planned.why_no_peak}" if planned.why_no_peak else ""
        return line + ("" if planned.step_s is None else f", {planned.step_s * 1e3:.1f} ms a step")

    def report(self, peak_bytes: int | None, step_s: float | None, comm_bytes: int | None = None) -> dict[str, Any]:
        """Return predicted and measured values side by side, for ``summary.json``; None if a value is not known."""
        planned = self.planned
        categories = [*planned.memory_bytes, *(self.memory_bytes.keys() - planned.memory_bytes.keys())]
        expected = [*planned.messages, *(planned.exchanges or ())] if self.expected is None else self.expected
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
            "comm_bytes": _pair(planned.comm_bytes, comm_bytes),
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
