"""How long a step waits for state that is off the device: copies over the bus, and updates by the host.

The host updates units in the order of the next forward, while that forward runs, so the forward waits only where it is
ahead of the updates. With the seconds d_k of the copy of unit k's gradients down, U_k of its update, u_k of the copy of
its new weights up, and the seconds b_k at which backward leaves it:

    down_k   = max(down_(k+1), b_k) + d_k            backward runs from the last unit to the first
    update_k = max(update_(k-1), down_k) + U_k        the first begins when all gradients are there, after the norm
    up_k     = max(up_(k-1), update_k) + u_k
    exposed  = max over k of (up_k - seconds of the forward before unit k)

At least the first update and its copies are exposed: nothing of the forward runs before them. So the units that are
used first are those whose state should stay on the device; `hidden_units` says how many others may leave for nothing.

With state in a file a unit is updated once it is read, and all units pass the disk one after the other, in D_k seconds
for reading unit k and writing it back; the update waits for those before it and for its own half, the reading:

    update_k = max(update_(k-1), down_k, sum of D_j over j < k + D_k / 2) + U_k

On a CPU the host's updates take their time from the same cores, and so does part of what a disk does. So all of that is
exposed, the updates as without offloading, and what the disk takes longer than all this is exposed in addition.

Update rate and bus: what ``zeroshard bench device`` measured. Of a GPU that nobody measured, the node's update rate is
that of CPU-Adam on a DGX-2, 1 B parameters in 0.22 s (Ren et al. 2021, "ZeRO-Offload",
https://arxiv.org/abs/2101.06840, table 4), and the bus is PCIe of its generation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zeroshard.host.slab import room
from zeroshard.lab.predict.actions import Settings
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.hardware import LINKS
from zeroshard.lab.predict.memory import (
    OptimizerState,
    RankBuffer,
    buffers_away,
    frozen_on_host,
    on_disk,
    unit_numels,
)
from zeroshard.lab.predict.model_spans import ROOT, Trace
from zeroshard.lab.predict.rates import Attention
from zeroshard.lab.predict.timeline import operation_s
from zeroshard.train.profiling.devices import Device, DiskWork
from zeroshard.zero import Offload
from zeroshard.zero.offload.staging import NUM_SLOTS, NUM_SLOTS_DOWN, locked_slot_bytes

OF_A_GATHER = 1 / 3  # of the seconds of a gather from the file: to ask for the pages, and to copy them (docs/log.md)
ADAM_BYTES = 28  # of an fp32 element: read gradient, weight and two states; written all but the gradient
NODE_UPDATE_BYTES_PER_S = 4.5e9 * ADAM_BYTES
_BUSES = {"nvlink5": "pcie5", "nvlink4": "pcie5", "nvlink3": "pcie4", "nvlink2": "pcie3", "xgmi2": "pcie4"}
_BUSES |= {"xgmi3": "pcie5", "xgmi4": "pcie5"}


@dataclass(frozen=True)
class HostRates:
    """Rates of a rank, while all ranks of its node are as busy.

    Attributes:
        update_bytes_per_s: bytes that an update reads and writes.
        bus_bytes_per_s: bytes of a copy in one direction, while the other is as busy.
        measured: whether `zeroshard bench device` measured them.
        walk_bytes_per_s: bytes of a rank's file that are read and written back; 0: not known.
        gather_bytes_per_s, write_bytes_per_s: bytes that gathers read there, and that gradients write; 0: not known.
        beside_s: by ``walk``, ``gather``, ``write``, seconds of computation on the same cores that a byte costs.
    """

    update_bytes_per_s: float
    bus_bytes_per_s: float
    measured: bool
    walk_bytes_per_s: float = 0.0
    gather_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    beside_s: Mapping[DiskWork, float] = field(default_factory=dict)


def host_rates(device: Device, ranks_per_node: int) -> HostRates:
    """The rates of ``device``'s host, or those of the module's docstring if nobody measured them."""
    disk = (device.disk_walk_bytes_per_s, device.disk_gather_bytes_per_s, device.disk_write_bytes_per_s)
    disk += (device.disk_beside_s if device.device_type == "cpu" else {},)
    if device.update_bytes_per_s and device.bus_bytes_per_s:
        return HostRates(device.update_bytes_per_s, device.bus_bytes_per_s, True, *disk)
    if device.device_type == "cpu":  # a copy reads and writes
        rate = device.bytes_per_s * device.memory_share
        return HostRates(rate, rate / 2, False, *disk)
    own = device.link if device.link.startswith("pcie") else _BUSES.get(device.link.partition("-")[0], "pcie4")
    bus = LINKS[own]
    return HostRates(NODE_UPDATE_BYTES_PER_S / ranks_per_node, bus.bytes_per_s * bus.share, False, *disk)


@dataclass(frozen=True)
class UnitTimes:
    """Of one unit with state off the device, in the order of the forward.

    Attributes:
        before_s: seconds of the forward before it runs.
        left_s: seconds of the backward after which it is left, which are counted from the backward's end: 0 for the
            unit that is left last.
        down_s, update_s, up_s: seconds of the copy of its gradients, its update, and the copy of its new weights.
        disk_s: seconds in which the disk reads and writes its part of the file; 0: there is none, or its rate is not
            known.
        grads_s: seconds in which the disk writes its gradients.
        gather_s: seconds in which a gather reads its weights from the file.
        disk_beside_s, grads_beside_s, gather_beside_s: seconds of computation that these three cost beside them.
    """

    before_s: float
    left_s: float
    down_s: float
    update_s: float
    up_s: float
    disk_s: float = 0.0
    grads_s: float = 0.0
    gather_s: float = 0.0
    disk_beside_s: float = 0.0
    grads_beside_s: float = 0.0
    gather_beside_s: float = 0.0


def exposed_s(units: Sequence[UnitTimes], *, same_cores: bool = False) -> float:
    """Seconds for which a step waits for these units; 0 if there are none.

    ``same_cores``: the forward and the updates take turns on the same cores, as on a CPU.
    """
    exposed = worked = 0.0
    for unit, up, worked in _updated(units):
        exposed = max(exposed, up - unit.before_s - (worked if same_cores else 0.0))
    return exposed + (worked if same_cores else 0.0)


def read_again_s(units: Sequence[UnitTimes], *, same_cores: bool = False) -> float:
    """Seconds in which gathers of the forward read weights from the file, because no slot of the update has them now.

    A slot is kept about as long as the next unit takes; ``same_cores``: as of `exposed_s`.
    """
    exposed = seconds = 0.0
    for unit, up, worked in _updated(units):
        before = unit.before_s + (worked if same_cores else 0.0)
        exposed = max(exposed, up - before)
        seconds += unit.gather_s if before + exposed > up + unit.disk_s else 0.0
    return seconds


def gathers_s(units: Sequence[UnitTimes], *, backward: bool) -> float:
    """Seconds for which a forward, or a ``backward``, waits for weights that its gathers read from the file.

    Each is read while the unit that was gathered before it computes; what that costs the computation, or `OF_A_GATHER`
    of it where nobody measured that, is left for the gather itself.
    """
    order = units[::-1] if backward else units
    begins = [unit.left_s if backward else -unit.before_s for unit in order]
    spans = [first - second for first, second in itertools.pairwise(begins)]
    # A backward's unit computes before it is left, a forward's after it was begun; of the first one that is not known.
    beside = [0.0, *spans[:1], *spans] if backward else [0.0, *spans]
    return sum(
        max(unit.gather_s - other, unit.gather_beside_s or unit.gather_s * OF_A_GATHER)
        for unit, other in zip(order, beside, strict=False)
    )


def _updated(units: Sequence[UnitTimes]) -> Iterator[tuple[UnitTimes, float, float]]:
    """Each unit, the second after the end of backward in which its new weights are there, and what updates took."""
    down = written = -max((unit.left_s for unit in units), default=0.0)
    for unit in reversed(units):
        down = max(down, -unit.left_s) + unit.down_s
        written = max(written, down) + unit.grads_s
    disk = update = up = max(down, written, 0.0)
    worked = 0.0
    for unit in units:
        update = max(update, disk + unit.disk_s / 2) + unit.update_s
        disk += unit.disk_s
        up = max(up, update) + unit.up_s
        worked += unit.update_s + unit.up_s + unit.disk_beside_s
        yield unit, up, worked


def why_all(offload: Offload, rates: HostRates, device_type: str) -> str:
    """Why all units leave, whatever a step waits for; empty: by `hidden_units`."""
    if not on_disk(offload):
        return ""
    if device_type == "cpu":
        return "memory of the device is that of the host"
    return "" if rates.walk_bytes_per_s else "the rates of the disk are not known"


def hidden_units(units: Sequence[UnitTimes]) -> int:
    """The most of the last ``units`` whose state may leave without a second of waiting."""
    num_units = 0
    while num_units < len(units) and exposed_s(units[len(units) - num_units - 1 :]) == 0:
        num_units += 1
    return num_units


def least_away(hidden: int, num_units: int, left: Callable[[int], float]) -> int:
    """The number of last units whose state leaves: ``hidden``, or if that does not fit the fewest that do, or all.

    ``left``: bytes that are left at a number, negative where it does not fit. Units are alike, so it grows nearly in
    proportion, and few numbers are tried. Where it does not, every second guess halves what is left to try.
    """
    low, high, at_low = hidden, num_units, left(hidden)
    if at_low >= 0 or hidden == num_units:
        return hidden
    at_high, halves = left(high), False
    while at_high >= 0 and high - low > 1:  # it fits at `high`, not at `low`
        share = 0.5 if halves else -at_low / (at_high - at_low)
        middle = min(max(low + math.ceil((high - low) * share), low + 1), high - 1)
        at_middle, before = left(middle), high - low
        if at_middle >= 0:
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
        halves = not halves and high - low > before // 2
    return high


def unit_seconds(trace: Trace, device: Device, attention: Attention = "flash-2") -> dict[str, tuple[float, float]]:
    """For each unit, root first: seconds of a forward before it, and of a backward after it has been left."""
    forward: dict[str, float] = {"root": 0.0}
    left: dict[str, float] = {}
    now, in_backward = 0.0, False
    for span in trace.spans:
        name = "root" if span.event.unit == ROOT else trace.units[span.event.unit]
        if span.event.name == "pre_backward" and not in_backward:
            now, in_backward = 0.0, True
        if span.event.name == "pre_forward" and not in_backward:
            forward.setdefault(name, now)
        if span.event.name in ("post_backward", "grad"):
            left[name] = now
        now += sum(operation_s(work, device, attention)[0] for work in span.work)
    left["root"] = now
    return {name: (before, now - left.get(name, now)) for name, before in forward.items()}


def unit_times(
    trace: Trace,
    buffers: Sequence[Buffer],
    optimizer: OptimizerState,
    settings: Settings,
    device: Device,
    rates: HostRates,
    attention: Attention = "flash-2",
) -> dict[str, UnitTimes]:
    """The times of every unit with trained parameters, as if the state of all were off the device; forward order."""
    seconds = unit_seconds(trace, device, attention)
    on_cpu = settings.device_type == "cpu"
    offload, walks, writes = settings.offload or Offload(), rates.walk_bytes_per_s, rates.write_bytes_per_s
    found: dict[str, UnitTimes] = {}
    for buffer in (buffer for buffer in buffers if buffer.trained):
        part, master = RankBuffer(buffer, settings), buffer.dtype.itemsize
        numel, reduced = part.updated_numel, part.policy.reduced_dtype(buffer.dtype).itemsize
        in_file = numel * _bytes_in_file(part, optimizer, offload) if walks else 0.0
        grads_bytes = numel * reduced if offload.grads == "disk" else 0
        update_bytes = numel * (reduced + 2 * master + optimizer.step_bytes(master)) * optimizer.cpu_factor
        stays = part.sends_master or (on_cpu and part.compute != buffer.dtype)  # a cast, of an update's time
        before_s, left_s = seconds.get(buffer.unit, (0.0, 0.0))
        more = UnitTimes(
            before_s,
            left_s,
            0.0 if on_cpu else numel * reduced / rates.bus_bytes_per_s,
            update_bytes / rates.update_bytes_per_s,
            0.0 if stays else numel * part.compute.itemsize / rates.bus_bytes_per_s,
            in_file / walks if walks else 0.0,
            grads_bytes / writes if writes else 0.0,
            numel * master / rates.gather_bytes_per_s if rates.gather_bytes_per_s else 0.0,
            in_file * rates.beside_s.get("walk", 0.0),
            grads_bytes * rates.beside_s.get("write", 0.0),
            numel * master * rates.beside_s.get("gather", 0.0),
        )
        was = found.get(buffer.unit)
        if was is not None:
            sums = {name: getattr(was, name) + getattr(more, name) for name in _SUMS}
            more = replace(was, **sums)
        found[buffer.unit] = more
    return found


_SUMS = ("down_s", "update_s", "up_s", "disk_s", "grads_s", "gather_s")
_SUMS += ("disk_beside_s", "grads_beside_s", "gather_beside_s")


def _bytes_in_file(part: RankBuffer, optimizer: OptimizerState, offload: Offload) -> float:
    """Bytes for each element that an update reads from the file and writes there: half of them if it only reads."""
    master = part.dtype.itemsize
    found = master if offload.master == "disk" else 0.0
    found += optimizer.bytes_per_element(master) if offload.optimizer == "disk" else 0.0
    grads = part.policy.reduced_dtype(part.dtype).itemsize / 2
    return found + (grads if offload.grads == "disk" else 0.0)


def waiting_s(
    times: dict[str, UnitTimes],
    buffers: Sequence[Buffer],
    settings: Settings,
    trace: Trace,
    device: Device,
    rates: HostRates,
) -> float:
    """Seconds for which a step waits for state that is off the device.

    Weights that are streamed cross the bus once more for each forward and each backward of the step, which hides as
    much of that as it lasts. Gathers read weights from the file for the forward and the backward of each micro-batch:
    `gathers_s`; for the first forward only where it comes after the updates: `read_again_s`.
    """
    offload, num_micro = settings.offload, settings.num_micro
    if offload is None:
        return 0.0
    away = buffers_away(buffers, offload)
    units = {buffer.unit for buffer in buffers if buffer.name in away}
    here = [unit for name, unit in times.items() if name in units]
    same_cores = device.device_type == "cpu"
    seconds = exposed_s(here, same_cores=same_cores) + sum(unit.grads_beside_s for unit in here)
    if offload.weights == "disk":
        seconds += read_again_s(here, same_cores=same_cores)
        seconds += num_micro * gathers_s(here, backward=True) + (num_micro - 1) * gathers_s(here, backward=False)
    frozen = frozen_on_host(buffers, settings)
    frozen_bytes = sum(_shard_bytes(RankBuffer(each, settings)) for each in buffers if each.name in frozen)
    streamed_s = frozen_bytes / rates.bus_bytes_per_s
    streamed_s += sum(unit.up_s for unit in here) if offload.weights == "host" else 0.0
    if streamed_s:
        passes = unit_seconds(trace, device)
        forward_s, backward_s = max(before for before, _ in passes.values()), max(left for _, left in passes.values())
        seconds += max(streamed_s - forward_s, 0.0) + max(streamed_s - backward_s, 0.0)
    return seconds


def _shard_bytes(part: RankBuffer) -> int:
    """Bytes of a rank's shard of the weights in the compute dtype."""
    return part.updated_numel * part.compute.itemsize


def share_of(buffers: Sequence[Buffer], num_units: int) -> float:
    """The shortest decimal ``fraction`` of `Offload` with which the last ``num_units`` units leave, and no other."""
    sizes = list(unit_numels(buffers).values())
    if num_units >= len(sizes):
        return 1.0
    fewer, share = (
        sum(sizes[len(sizes) - number :]) / sum(sizes) if number > 0 else 0 for number in (num_units - 1, num_units)
    )
    shorter = (math.floor(share * 10**digits) / 10**digits for digits in range(1, 17))
    return next((each for each in shorter if each > fewer), 0.0)


def pinned_bytes(buffers: Sequence[Buffer], settings: Settings) -> int:
    """Bytes of a rank's page-locked memory on a GPU: slots for copies, what is streamed, gradients on the host.

    They are locked in that order, each of the last two if the bound leaves room; gradients that it has none for come
    down through slots of their own.
    """
    offload = settings.offload
    if offload is None or settings.device_type != "cuda":
        return 0
    away, parts = buffers_away(buffers, offload), [RankBuffer(buffer, settings) for buffer in buffers]
    chosen = [part for part in parts if part.buffer.name in away]
    sent = {*frozen_on_host(buffers, settings), *(away if offload.weights == "host" else ())}
    wanted = [room(_shard_bytes(part)) for part in parts if part.buffer.name in sent]
    wanted += [room(part.reduced_bytes) for part in reversed(chosen)]
    slot_bytes, through_slots = locked_slot_bytes(offload.pinned_bytes), False
    left = math.inf
    if offload.pinned_bytes is not None:
        left = offload.pinned_bytes - (NUM_SLOTS + NUM_SLOTS_DOWN) * slot_bytes
    total = NUM_SLOTS * slot_bytes if chosen else 0
    for index, num_bytes in enumerate(wanted):
        if num_bytes <= left:
            total, left = total + num_bytes, left - num_bytes
        else:
            through_slots = through_slots or index >= len(wanted) - len(chosen)
    return total + (NUM_SLOTS_DOWN * slot_bytes if through_slots else 0)
