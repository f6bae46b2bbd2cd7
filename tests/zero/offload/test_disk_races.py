"""Slots, extents of the file and masters are ordered by what threads wait for: no race, and races are seen.

The threads that update and that copy are lanes (`lanes`), and all memory is of the host. A view of the file and a copy
between file and slot touch the same bytes of the file, wherever they are mapped.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import Counter
from itertools import product

import pytest
import torch

import hazards
from hazards import Hazard, HazardDevice
from nets import Net, rows
from pairwise import cover
from soak import soaking
from zero.offload.lanes import Lanes
from zeroshard.comm import NullCommunicator
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero
from zeroshard.zero.offload import disk, grad_slots, host_grads, host_params, on_disk, placement
from zeroshard.zero.offload.on_disk import UnitOnDisk


class Host(HazardDevice):
    """Memory of the host and of one file; whoever acts now is `host`."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.file, self.slots, self.extents = hazards._Memory("", Counter()), [], []
        pages, add, read, write = disk._pages, disk.DiskStates._add, disk._read, disk._write
        new = grad_slots.GradSlots._new

        def made(num_bytes):
            memory = pages(num_bytes)  # kept, so that no other lies at its address
            self.slots.append((_address(memory), len(memory), hazards._Memory("", Counter()), memory))
            return memory

        def added(states, *args, **kwargs):
            extent, there = add(states, *args, **kwargs)
            self.extents.append((_address(there), extent.num_bytes, extent.start))
            return extent, there

        def slot(slots, num_bytes, device):
            memory = new(slots, num_bytes, device)
            self.slots.append((memory.data_ptr(), len(memory), hazards._Memory("", Counter()), memory))
            return memory

        def reads(file, path, into, at):
            self.touch("read", [(self.file, (at, at + len(into)))], [self.at(_address(into), len(into))])
            read(file, path, into, at)

        def writes(file, path, data, at):
            self.touch("write", [self.at(_address(data), len(data))], [(self.file, (at, at + len(data)))])
            write(file, path, data, at)

        monkeypatch.setattr(disk, "_pages", made)
        monkeypatch.setattr(grad_slots.GradSlots, "_new", slot)
        monkeypatch.setattr(disk.DiskStates, "_add", added)
        monkeypatch.setattr(disk, "_read", reads)
        monkeypatch.setattr(disk, "_write", writes)

    def at(self, address, num_bytes):
        """The memory at an address, and which bytes of it."""
        for start, size, memory, _ in self.slots:
            if start <= address < start + size:
                return memory, (address - start, address - start + num_bytes)
        for start, size, place in reversed(self.extents):  # an address may have been that of another mapping before
            if start <= address < start + size:
                return self.file, (address - start + place, address - start + place + num_bytes)
        return None

    def touch(self, what, reads, writes):
        """One operation of who acts now."""
        now = self.host.tick()
        found = [(each, writing) for touched, writing in ((reads, False), (writes, True)) for each in touched if each]
        new = [(memory, hazards._Access(self.host.name, now, what, span, writing)) for (memory, span), writing in found]
        for memory, access in new:
            self._check(memory, self.host, access)
        for memory, access in new:
            memory.add(access)

    def access(self, stream, what, reads=(), writes=()):
        def of(tensors):
            return [self.at(t.data_ptr(), hazards._span(t)[1] - hazards._span(t)[0]) or self.plain(t) for t in tensors]

        self.touch(what, of(reads), of(writes))

    def plain(self, tensor):
        """Memory of torch's own."""
        return self._of(tensor), hazards._span(tensor)

    def _taken(self):
        return hazards._Memory("", Counter())  # the host's allocator orders those who free and those who take


def _address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


PLACES = {
    "host": Offload(),
    "disk": Offload("disk", "disk", path="states"),
    "all on disk": Offload("disk", "disk", "disk", path="states"),
}
STREAMED = {  # at stage 3
    "weights on the host": Offload(weights="host"),
    "weights on disk": Offload("disk", "disk", "disk", "disk", path="states"),
}


def _train(
    monkeypatch,
    stage,
    place,
    num_micro=1,
    around="",
    bfloat16=True,
    plant=None,
    without=(),
    num_ranks=2,
    walk_is_over=True,
):
    """Train some steps; return how often each function has waited for what was not over. ``without``: these do not.

    ``walk_is_over``: whether weights are gathered when all units have been updated; else slots still have some.
    """
    host, sites = Host(monkeypatch), Counter()
    lanes = Lanes(host)
    join = lanes.join

    def joined(clock):
        frame = sys._getframe(1)
        while "zeroshard/zero/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame.f_code.co_qualname == "Landing.synchronize":
            frame = frame.f_back  # whose mark it is
        site = frame.f_code.co_qualname
        if not all(lane_time <= host.host.clock[name] for name, lane_time in clock.items()):
            sites[site] += 1
        if site not in without:
            join(clock)

    lanes.join = joined
    lanes.patch(monkeypatch, placement)
    monkeypatch.setattr(disk, "ThreadPoolExecutor", lambda num_threads, **_: lanes.pool(num_threads))
    for module in (disk, grad_slots):
        monkeypatch.setattr(module, "wait", lanes.wait)
    if place in STREAMED:
        settle = disk.DiskStates.settle

        def settled(states):
            writing = states._writing  # lanes run at once: while a gather waits for a unit, a walk may have more to do
            if walk_is_over:
                settle(states)
            states._writing = writing

        monkeypatch.setattr(disk.DiskStates, "settle", settled)
    if plant is not None:
        plant(monkeypatch)
    net = Net(4)
    with host:
        precision = MixedPrecision(torch.bfloat16 if bfloat16 else None)
        comm = NullCommunicator(1 if around == "restage" else num_ranks)  # whose ranks answer nothing
        offload = (PLACES | STREAMED)[place]
        zero = Zero(net, stage, units=list(net.blocks), comm=comm, precision=precision, offload=offload)
        host.watch(zero)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(4):
            for micro in range(num_micro):
                with zero.micro_batch(last=micro == num_micro - 1):
                    net(rows(0, step)).float().square().mean().backward()
            zero.clip_grad_norm_(0.05)
            if around == "reads":
                zero.full_grads()
            if around != "skipped" or step != 2:
                optim.step()
            optim.zero_grad()
            if around == "restage" and step == 1:
                zero.restage((stage + 1) % 4)
            if step % 2:  # a checkpoint
                for shard in zero.named_shards():
                    shard.tensor.clone()
    return sites


@pytest.mark.redundant(but=["2-all on disk-1-restage", "1-disk-2-skipped", "0-host-1-", "3-disk-1-skipped"])
@pytest.mark.parametrize("around", ["", "skipped", "restage"])
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.pairwise("place", "num_micro")
def test_nothing_is_touched_before_what_it_must_wait_for(stage, place, num_micro, around, monkeypatch, tmp_path):
    """`_train` raises `Hazard` if it is."""
    monkeypatch.chdir(tmp_path)
    _train(monkeypatch, stage, place, num_micro, around)


@pytest.mark.redundant(
    but=[
        "True-1-weights on disk-1-restage",
        "False-1-weights on the host-1-skipped",
        "False-2-weights on disk-1-",
        "True-1-weights on the host-2-",
    ]
)
@pytest.mark.parametrize("around", ["", "skipped", "restage"])
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("place", STREAMED)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("walk_is_over", [True, False])
@pytest.mark.pairwise
def test_streamed_weights_wait_for_what_they_must(
    walk_is_over, num_ranks, place, num_micro, around, monkeypatch, tmp_path
):
    """`_train` raises `Hazard` if it is."""
    monkeypatch.chdir(tmp_path)
    _train(monkeypatch, 3, place, num_micro, around, num_ranks=num_ranks, walk_is_over=walk_is_over)


# Functions that wait; those in a line are each other's second line, and a wait of `Landing.synchronize` is that of who
# called it. `_give_up` waits for a unit that a load has given further states after it was read ahead, which is no part
# of this schedule.
WAITS = [
    {"HostParams.master"},
    {"Executor.drain"},
    {"DiskStates._finish_reading"},
    {"DiskStates._finish_writing"},
    {"DiskStates._begin_reading"},
    {"GradSlots._free_slot"},
    {"HostGrads.reduced"},
]
OTHERS = {"DiskStates._give_up"}


@pytest.mark.redundant(but=["GradSlots._free_slot", "HostGrads.reduced"])
@pytest.mark.parametrize("removed", WAITS, ids=lambda removed: " and ".join(sorted(removed)))
def test_each_wait_that_is_removed_is_seen(removed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    around = "reads" if "HostGrads.reduced" in removed else ""  # of gradients that a user has read the update knows
    with pytest.raises((Hazard, RuntimeError), match="does not wait for"):
        _train(monkeypatch, 0, "all on disk", around=around, without=removed)


GATHERS_WAIT = {  # of what is gathered from the file the write is waited for, and it comes after the update
    "weights on the host": {"HostParams.master"},
    "weights on disk": {"DiskStates.wait"},
}


@pytest.mark.redundant(but=["weights on disk-2", "weights on the host-1"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("place", STREAMED)
def test_a_gather_that_does_not_wait_for_its_source_is_seen(place, num_ranks, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Hazard, match="does not wait for"):
        _train(monkeypatch, 3, place, without=GATHERS_WAIT[place], num_ranks=num_ranks)


def test_a_gather_that_does_not_wait_for_the_update_of_what_is_in_a_slot_is_seen(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    reads, will_read = [], disk.DiskStates.will_read
    monkeypatch.setattr(disk.DiskStates, "will_read", lambda file, unit: (reads.append(unit), will_read(file, unit)))

    def train(**how):
        reads.clear()
        with monkeypatch.context() as patches:
            _train(patches, 3, "weights on disk", **how)
        return len(reads)

    assert train(walk_is_over=False) < train()
    with pytest.raises(Hazard, match="does not wait for"):
        train(walk_is_over=False, without={"HostParams.master"})


@pytest.mark.parametrize("updates_are_over", [True, False])
def test_the_next_gather_is_read_ahead_unless_units_are_updated(updates_are_over, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    steps = [[]]  # of each its gathers: the unit, and which ones are then read

    def told(cls, name, before):
        call = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda self, unit: (before(unit), call(self, unit))[1])

    told(on_disk.GatherOrder, "after", lambda unit: steps[-1].append((unit, [])))
    told(disk.DiskStates, "will_read", lambda unit: steps[-1][-1][1].append(unit))
    told(disk.DiskStates, "expect", lambda units: steps.append([]))
    _train(monkeypatch, 3, "weights on disk", walk_is_over=updates_are_over)
    first, *others, none = steps
    assert (len(others), none) == (3, [])
    assert all(read == [unit] for unit, read in first)
    for gathers in others[not updates_are_over :]:  # slots are given up in the first step, which makes states
        following = [[unit] for unit, _ in gathers[1:]] + [[]]
        for (unit, read), then in zip(gathers, following, strict=True):
            assert read == [unit, *then] if updates_are_over else read in ([], [unit])


def test_the_order_of_gathers_is_that_of_the_last_step():
    order, units = on_disk.GatherOrder(), [UnitOnDisk(None, masters=True, states=False) for _ in range(4)]

    def step():
        found = [order.after(units[place]) for place in (0, 1, 2, 3, 2, 1, 0)]
        order.restart()
        return [None if unit is None else units.index(unit) for unit in found]

    assert step() == [None] * 7
    assert step() == [1, 2, 3, 2, 1, 0, None]
    units[3] = UnitOnDisk(None, masters=True, states=False)  # the last one is gone
    gc.collect()
    assert step() == [1, 2, None, None, None, 0, None]


def test_these_are_all_the_waits(monkeypatch, tmp_path):
    found, cases = set(), list(product(PLACES, STAGES, ("", "reads")))
    for number in range(len(cases)) if soaking() else cover(cases, paired=(0, 2)):
        place, stage, around = cases[number]
        with monkeypatch.context() as patches:
            (tmp_path / str(number)).mkdir()
            patches.chdir(tmp_path / str(number))  # an engine that nobody has freed yet keeps its file
            found |= set(_train(patches, stage, place, num_micro=2 if around else 1, around=around))
    assert found - OTHERS == set().union(*WAITS)


def _slot_used_while_it_is_written(monkeypatch):
    free_slot = disk.DiskStates._free_slot

    def taken(self, unit):
        with monkeypatch.context() as careless:
            careless.setattr(disk.DiskStates, "_finish_writing", lambda self, slot: None)
            return free_slot(self, unit)

    monkeypatch.setattr(disk.DiskStates, "_free_slot", taken)


def _read_before_it_is_written(monkeypatch):
    monkeypatch.setattr(on_disk.UnitOnDisk, "wait", lambda self: None)
    monkeypatch.setattr(disk.DiskStates, "_finish_writing", lambda self, slot: None)


def _gathered_before_the_update(monkeypatch):
    own = host_params.HostParams.master
    monkeypatch.setattr(host_params.HostParams, "master", property(lambda self: self._master, own.fset))


def _saved_in_mid_update(monkeypatch):
    named_shards = Zero.named_shards

    def saved(self):
        with monkeypatch.context() as careless:
            careless.setattr(placement.Update, "wait", lambda self: None)
            yield from list(named_shards(self))

    monkeypatch.setattr(Zero, "named_shards", saved)


def _gradients_read_before_they_are_written(monkeypatch):
    write_input = disk.DiskStates.write_input

    def begun(self, unit, *args):
        pieces = write_input(self, unit, *args)
        self._arriving.pop(unit)
        return pieces

    monkeypatch.setattr(disk.DiskStates, "write_input", begun)


def _slot_of_gradients_filled_while_it_is_written(monkeypatch):
    free_slot = grad_slots.GradSlots._free_slot

    def taken(self, device):
        self._slots = [(slot, grad_slots.Landing([])) for slot, _ in self._slots]
        return free_slot(self, device)

    monkeypatch.setattr(grad_slots.GradSlots, "_free_slot", taken)


def _gradients_seen_while_they_arrive(monkeypatch):
    reduced = host_grads.HostGrads.reduced
    monkeypatch.setattr(host_grads.HostGrads, "reduced", property(lambda self: self._reduced, reduced.fset))


PLANTED = {
    "a slot is used again before its write is done": ("disk", _slot_used_while_it_is_written),
    "an extent is read before it is written": ("disk", _read_before_it_is_written),
    "weights are gathered before the update has cast them": ("disk", _gathered_before_the_update),
    "weights are gathered before they are updated": ("host", _gathered_before_the_update),
    "a checkpoint is taken in mid-update": ("host", _saved_in_mid_update),
    "a checkpoint of the file is taken in mid-update": ("disk", _saved_in_mid_update),
    "gradients are read before they are in the file": ("all on disk", _gradients_read_before_they_are_written),
    "a slot of gradients is filled while it is written": ("all on disk", _slot_of_gradients_filled_while_it_is_written),
    "gradients in the file are read while they arrive": ("all on disk", _gradients_seen_while_they_arrive),
}


@pytest.mark.redundant(but=["a checkpoint of the file is taken in mid-update"])
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_seen(what, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    place, plant = PLANTED[what]
    with pytest.raises((Hazard, RuntimeError), match="does not wait for"):
        _train(monkeypatch, 2, place, around="reads" if plant is _gradients_seen_while_they_arrive else "", plant=plant)
