"""What to change where no row of a plan fits, in the order in which one would try, each with its memory and time.

First what ``--fit`` finds (`zeroshard.lab.planner.fit`): for what is trained as it is, for adapters, and for shorter
sequences. Then what costs money: a larger GPU, more GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from zeroshard.host.errors import UserError
from zeroshard.lab.planner.advice import GIB, MICRO_BATCHES, describe
from zeroshard.lab.planner.fit import chosen, fitted
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


class Change(NamedTuple):
    """A change, and the row of the job with it.

    Attributes:
        what: it in words, with its flag.
        flags: of levers that are pulled beside it.
        num_gpus: of all nodes.
        row: the recommended row; if none fits, the one that needs least.
        cost: what it costs besides time and memory.
    """

    what: str
    flags: tuple[str, ...]
    num_gpus: int
    row: Row
    cost: str = ""

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
    if not any(change.row.fits for change in found):
        return f"{start}; no single change helps: take a larger GPU or a smaller model."
    by_itself = " (--fit adds what stands after 'with')" if any(change.flags for change in found) else ""
    what = f"What to change, in the order in which to try it{by_itself}:"
    return "\n".join([f"{start}. {what}", *(f"  {change.in_words()}" for change in found)])


def found_by_fit(planner: Planner, ways: Ways) -> Iterator[Change]:
    """What ``--fit`` finds: for the job as it is, for adapters, and for the longest sequences for which it does."""
    workload, model, num_gpus = planner.workload, planner.workload.described, planner.cluster.world_size
    if ways.micro_batch is not None and ways.micro_batch > 1:
        row = replace(ways, micro_batch=None).best(planner)
        yield Change("a smaller micro-batch (leave --micro-batch out)", (), num_gpus, row)
    if planner.asked.node_copy:
        row = ways.best(planner.on(node_copy=None))
        yield Change("no second copy of weights (leave --node-copy out)", (), num_gpus, row)
    if model.config is None:
        return
    if found := _by_fit(planner, ways, "the job as it is"):
        yield found
    if model.lora is not None:
        yield from _coded_base(planner, ways, "")
    elif workload.optimizer == "AdamW" and model.matmul != "fp8":
        with suppress(UserError):  # what adds adapters, peft, is not installed
            adapters = planner.on(workload=workload.changed(lora=Lora(LORA_RANK)))
            cost = "it trains adapters of weights that must be there already"
            found = _by_fit(adapters, ways, f"LoRA (--lora {LORA_RANK})", cost, alone=True)
            assert found is not None
            yield found
            if not found.row.fits:
                yield from _coded_base(adapters, ways, f"--lora {LORA_RANK} ")
    if shorter := _shorter_sequences(planner, ways):
        yield shorter


def _coded_base(planner: Planner, ways: Ways, flags: str) -> Iterator[Change]:
    """Adapters over weights that are kept in four bits, unless they are kept in fewer already."""
    workload = planner.workload
    if workload.frozen_format is None and not planner.asked.node_copy:
        form = FrozenFormat("nf4")
        coded = planner.on(workload=workload.changed(frozen_format=form), frozen_format=form)
        cost = "the weights under the adapters are rounded to four bits"
        if found := _by_fit(coded, ways, f"a base of four bits ({flags}--base nf4)", cost, alone=True):
            yield found


def _by_fit(planner: Planner, ways: Ways, what: str, cost: str = "", *, alone: bool = False) -> Change | None:
    """The change with what ``--fit`` finds; None if there are no levers, unless it is something ``alone``."""
    best = chosen(fitted(planner, ways))
    if not best.flags and not alone:
        return None
    return Change(what, best.flags, planner.cluster.world_size, best.row, cost)


def _shorter_sequences(planner: Planner, ways: Ways) -> Change | None:
    """The longest sequences that fit among a half, a quarter, ... of the job's; None if none do.

    Shorter sequences need no more memory.
    """
    seq_len, share = planner.workload.seq_len, planner.workload.sequence_parallel
    lengths = [seq_len >> times for times in range(1, seq_len.bit_length()) if (seq_len >> times) % share == 0]

    def at(place: int) -> Change | None:
        length = lengths[place]
        there = planner.on(workload=planner.workload.changed(seq_len=length))
        best = chosen(fitted(there, ways))
        what = f"sequences of {length} tokens (--seq-len {length})"
        return Change(what, best.flags, planner.cluster.world_size, best.row) if best.fits else None

    found, low, high = None, -1, len(lengths)  # `found` is at `high`; none fits at `low`
    while high - low > 1:
        middle = (low + high) // 2 if low >= 0 else 0  # a half is often enough
        change = at(middle)
        found, low, high = (found, middle, high) if change is None else (change, low, middle)
    return found


def _bought(planner: Planner, ways: Ways) -> Iterator[Change]:
    """A larger GPU, and more of them."""
    num_gpus, every = planner.cluster.world_size, Ways(ways.stages)
    for device in sorted(DEVICES.values(), key=lambda each: each.memory_bytes):
        larger = planner.device.name in DEVICES and device.memory_bytes > planner.device.memory_bytes
        if larger and device.device_type == planner.device.device_type:
            there = planner.on(device=device)
            fits = (there.fits(stage, _smallest(there)) for stage in reversed(ways.stages))
            if planner.workload.dtype in device.matmul_flops_per_s and any(fits):
                yield Change(f"a larger GPU (--gpu {device.name})", (), num_gpus, every.best(there))
                break
    if planner.workload.sequence_parallel > 1:
        return  # GPUs that share sequences come in groups, which the search does not know
    thrifty = [lever for lever in levers(planner) if lever.flag.endswith(" full")]
    for pulled in ([], thrifty):
        way = pulled[0].pull(planner) if pulled else planner
        more = fewest_gpus(way, ways.stages, _smallest(way))
        if more is not None:
            row = every.best(way.on(world_size=more, global_batch=None))
            yield Change(f"{more:,} GPUs", tuple(lever.flag for lever in pulled), more, row)
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
