"""What to change where no row of a plan fits, in the order in which one would try, each with its memory and time.

First what ``--fit`` finds (`zeroshard.lab.planner.fit`): for what is trained as it is, for adapters, and for shorter
sequences. Then what costs money: a larger GPU, more GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from zeroshard.host.errors import UserError
from zeroshard.lab.planner.advice import GIB, MICRO_BATCHES, describe
from zeroshard.lab.planner.fit import Tried, chosen, fitted
from zeroshard.lab.planner.levers import levers
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds
from zeroshard.lab.planner.ways import Ways
from zeroshard.models.adapters import Lora
from zeroshard.train.profiling.devices import DEVICES
from zeroshard.zero import FrozenFormat, ShardingStrategy

LORA_RANK = 16
MOST_GPUS = 2**17
Stages = Sequence[int | ShardingStrategy]


@dataclass(frozen=True)
class Change:
    """A change, and what was tried of the job with it. Whether it fits is known before its row is.

    Attributes:
        what: it in words, with its flag.
        num_gpus: of all nodes.
        tried: sets of levers beside it.
        cost: what it costs besides time and memory.
        alone: whether it is a change without a lever too.
    """

    what: str
    num_gpus: int
    tried: Sequence[Tried]
    cost: str = ""
    alone: bool = True

    @property
    def fits(self) -> bool:
        """Whether it does with any of the sets."""
        return any(each.fits for each in reversed(self.tried))

    @cached_property
    def best(self) -> Tried:
        """The set that is chosen; if none fits, the one that needs least."""
        return chosen(self.tried)

    @property
    def row(self) -> Row:
        """The recommended row of the best set."""
        return self.best.row

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of the best set."""
        return self.best.flags

    def in_words(self) -> str:
        """The change in a line."""
        row, off, cost = self.row, self.row.offloaded, self.cost
        name = f"{self.what}{' with ' * bool(self.flags)}{' '.join(self.flags)}"
        if not row.fits:
            host = f"{row.node_host_bytes / GIB:,.0f} GiB of host memory a node"
            return f"{name} would not do: {host if row.fits_device else f'{row.needed_bytes / GIB:,.1f} GiB'}"
        if off.fraction:
            cost = (
                f"{cost}{'; ' * bool(cost)}{off.host_bytes * off.ranks_per_node / GIB:,.0f} GiB of host memory a node"
            )
        facts = f"{row.needed_bytes / GIB:,.1f} GiB, {seconds(row.timing.step_s)} a step"
        facts += f", {row.tokens_per_s:,.0f} tokens/s"
        return f"{name} would fit, at {describe(row, self.num_gpus)}: {facts}{cost and f'; {cost}'}"


def changes_that_fit(planner: Planner, ways: Ways, rows: Sequence[Row]) -> str:
    """Say that nothing fits, and list the changes that would make a row fit, a line each.

    Args:
        planner: the planner of the rows.
        ways: the ways to run that were planned.
        rows: the rows, none of which fits.
    """
    best = min(rows, key=lambda row: row.needed_bytes)
    gib = f"{best.needed_bytes / GIB:,.1f} GiB where {planner.device.memory_bytes / GIB:.1f} are"
    if best.headroom_bytes >= 0:
        gib += f" and {planner.asked.headroom:.0%} must stay free"
    start = f"Nothing fits: {describe(best, planner.cluster.world_size)} needs {gib}"
    found = [*found_by_fit(planner, ways), *_bought(planner, ways)]
    if not any(change.fits for change in found):  # then nobody asks for their rows
        return f"{start}; no single change helps: take a larger GPU or a smaller model."
    found = [change for change in found if change.alone or change.flags]
    by_itself = " (--fit adds what stands after 'with')" if any(change.flags for change in found) else ""
    what = f"What to change, in the order in which to try it{by_itself}:"
    return "\n".join([f"{start}. {what}", *(f"  {change.in_words()}" for change in found)])


def found_by_fit(planner: Planner, ways: Ways) -> Iterator[Change]:
    """What ``--fit`` finds: for the job as it is, for adapters, and for the longest sequences for which it does."""
    workload, model, num_gpus = planner.workload, planner.workload.described, planner.cluster.world_size
    if ways.micro_batch is not None and ways.micro_batch > 1:
        tried = Tried((), planner, replace(ways, micro_batch=None))
        yield Change("a smaller micro-batch (leave --micro-batch out)", num_gpus, [tried])
    if planner.asked.node_copy:
        tried = Tried((), planner.on(node_copy=None), ways)
        yield Change("no second copy of weights (leave --node-copy out)", num_gpus, [tried])
    if model.config is None:
        return
    as_it_is = fitted(planner, ways)
    yield Change("the job as it is", num_gpus, as_it_is, alone=False)
    if model.lora is not None:
        yield from _coded_base(planner, ways, "")
    elif workload.optimizer == "AdamW" and model.matmul != "fp8":
        with suppress(UserError):  # what adds adapters, peft, is not installed
            adapters = planner.on(workload=workload.changed(lora=Lora(LORA_RANK)))
            cost = "it trains adapters of weights that must be there already"
            found = Change(f"LoRA (--lora {LORA_RANK})", num_gpus, fitted(adapters, ways), cost)
            yield found
            if not found.fits:
                yield from _coded_base(adapters, ways, f"--lora {LORA_RANK} ")
    if any(each.ways.state_fits(each.planner) for each in as_it_is):  # which shorter sequences do not change
        yield from _shorter_sequences(planner, ways)


def _coded_base(planner: Planner, ways: Ways, flags: str) -> Iterator[Change]:
    """Adapters over weights that are kept in four bits, unless they are kept in fewer already."""
    workload = planner.workload
    if workload.frozen_format is None and not planner.asked.node_copy:
        form = FrozenFormat("nf4")
        coded = planner.on(workload=workload.changed(frozen_format=form), frozen_format=form)
        cost = "the weights under the adapters are rounded to four bits"
        what = f"a base of four bits ({flags}--base nf4)"
        yield Change(what, planner.cluster.world_size, fitted(coded, ways), cost)


def _shorter_sequences(planner: Planner, ways: Ways) -> Iterator[Change]:
    """The longest sequences that fit among a half, a quarter, ... of the job's, if any do.

    Shorter sequences need no more memory.
    """
    seq_len, share = planner.workload.seq_len, planner.workload.sequence_parallel
    lengths = [seq_len >> times for times in range(1, seq_len.bit_length()) if (seq_len >> times) % share == 0]

    def at(place: int) -> Change | None:
        length = lengths[place]
        there = planner.on(workload=planner.workload.changed(seq_len=length))
        what = f"sequences of {length} tokens (--seq-len {length})"
        change = Change(what, planner.cluster.world_size, fitted(there, ways))
        return change if change.fits else None

    found, low, high = None, -1, len(lengths)  # `found` is at `high`; none fits at `low`
    while high - low > 1:
        middle = (low + high) // 2 if low >= 0 else 0  # a half is often enough
        change = at(middle)
        found, low, high = (found, middle, high) if change is None else (change, low, middle)
    if found is not None:
        yield found


def _bought(planner: Planner, ways: Ways) -> Iterator[Change]:
    """A larger GPU, and more of them."""
    num_gpus, every = planner.cluster.world_size, Ways(ways.stages)
    for device in sorted(DEVICES.values(), key=lambda each: each.memory_bytes):
        larger = planner.device.name in DEVICES and device.memory_bytes > planner.device.memory_bytes
        if larger and device.device_type == planner.device.device_type:
            there = planner.on(device=device)
            fits = (there.fits(stage, _smallest(there)) for stage in reversed(ways.stages))
            if planner.workload.dtype in device.matmul_flops_per_s and any(fits):
                yield Change(f"a larger GPU (--gpu {device.name})", num_gpus, [Tried((), there, every)])
                break
    if planner.workload.sequence_parallel > 1:
        return  # GPUs that share sequences come in groups, which the search does not know
    thrifty = [lever for lever in levers(planner) if lever.flag.endswith(" full")]
    for pulled in ([], thrifty):
        way = pulled[0].pull(planner) if pulled else planner
        more = fewest_gpus(way, ways.stages, _smallest(way))
        if more is not None:
            there = way.on(world_size=more, global_batch=None)
            tried = Tried(tuple(lever.flag for lever in pulled), there, every)
            yield Change(f"{more:,} GPUs", more, [tried])
            break


def fewest_gpus(planner: Planner, stages: Stages, micro_batch: int) -> int | None:
    """The smallest world size up to `MOST_GPUS`, in full nodes beyond the first, at which a stage fits, or None."""
    per_node = planner.cluster.ranks_per_node

    def in_full_nodes(world_size: int) -> int:
        """Round up to full nodes, among which a second copy of weights can be divided."""
        return world_size if world_size <= per_node else -(-world_size // per_node) * per_node

    def at(world_size: int) -> Planner:
        return planner.on(world_size=in_full_nodes(world_size), global_batch=None)

    def fits(world_size: int) -> bool:
        return any(at(world_size).fits(stage, micro_batch) for stage in reversed(stages))

    def may_fit(world_size: int) -> bool:
        there = at(world_size)
        return any(there.leaves_room(there.least_bytes(stage, micro_batch)) for stage in reversed(stages))

    in_blocks = planner.workload.states[0].block > 1  # whose padding may need more memory in a larger world
    low, high = 0, 1
    while high <= MOST_GPUS and not may_fit(high):
        low, high = high, high * 2
    if high > MOST_GPUS or not (fits(high) or in_blocks or fits(MOST_GPUS)):
        return None
    while not fits(high):
        low, high = high, high * 2
        if high > MOST_GPUS:
            return None
    while high - low > 1:  # fits at `high`, not at `low`
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return in_full_nodes(high)


def _smallest(planner: Planner) -> int:
    return next((size for size in MICRO_BATCHES if planner.num_micro(size)), 1)
