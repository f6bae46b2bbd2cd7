"""Copies to the host and back are ordered by streams, events and the host's own waits: no race, and races are seen.

The device is that of `fake_cuda`: operations on its tensors belong to the stream that is current, those on tensors of
the host to the host. Whatever the host queues comes after what it has done; it comes after what it has waited for.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import hazards
from fake_cuda import CUDA, Peers, backward_events, guarded  # noqa: F401 -- fixtures
from hazards import Hazard, HazardDevice
from nets import WIDTH
from zero.offload.lanes import Lanes
from zeroshard.comm import streams
from zeroshard.comm.base import DONE
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero
from zeroshard.zero.core import passes
from zeroshard.zero.offload import grad_slots, host_grads, host_params, placement, rank_files, staging

COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)


class Bus(HazardDevice):
    """A device and a host with memory of its own."""

    def _of(self, tensor):
        before, self.current = self.current, self.host if tensor.device.type == "cpu" else self.current
        try:
            return super()._of(tensor)
        finally:
            self.current = before

    def access(self, stream, what, reads=(), writes=()):
        kinds = {tensor.device.type for tensor in (*reads, *writes)}
        if kinds == {"cpu"}:
            stream = self.host
        else:
            stream.clock |= self.host.clock  # the host has done this before it queued the operation
        super().access(stream, what, reads, writes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        waits = func.overloadpacket in COPIES and not ((kwargs or {}).get("non_blocking") or args[2:] == (True,))
        if waits and {result.device.type, args[len(args) > 1].device.type} == {"cpu", "cuda"}:
            self.host.clock |= self.current.clock
        return result


class Ranks(Peers):
    """Collectives on the stream that issues them."""

    def _issue(self, op, *tensors):
        self._device.access(self._device.current, op, tensors[1:] or tensors, tensors[:1])
        return DONE


class Pages:
    """A slab of ordinary memory, of which it is known whether it would be page-locked."""

    locked = []  # noqa: RUF012 -- bytes of each that would be, in the last training

    def __init__(self, num_bytes, *, device, pinned):
        self.num_bytes = num_bytes
        if pinned:
            self.locked.append(num_bytes)

    def take(self, numel, dtype):
        return torch.empty(numel, dtype=dtype)


class File:
    """A rank's file for gradients, without bytes: threads write them there, and read them for an update."""

    slots = ()

    def __init__(self, lanes):
        self._threads, self._inputs, self._arriving = lanes.pool(3), {}, {}

    def __contains__(self, unit):
        return unit in self._inputs

    def add_input(self, unit, numel, dtype):
        self._inputs[unit] = torch.empty(numel, dtype=dtype)
        return self._inputs[unit]

    @property
    def input_bytes(self):
        return [values.nbytes for values in self._inputs.values()]

    def write_input(self, unit, values, after):
        there = self._inputs[unit]

        def write():
            if after is not None:
                after()
            there.copy_(values[: there.nbytes].view(there.dtype))

        self._arriving[unit] = [self._threads.submit(write)]
        return self._arriving[unit]

    def read(self, unit):
        for piece in self._arriving.pop(unit, ()):
            piece.result()
        return [self._threads.submit(self._inputs[unit].clone).result()]

    def write(self, unit):
        """Inputs are not written back."""

    expect = settle = wait = forget_pages = lambda self, *_: None


def _train(
    monkeypatch, stage, offload, world_size=4, bfloat16=True, num_micro=1, plant=lambda monkeypatch: None, frozen=False
):
    """``frozen``: matrices are, and after each step values are loaded into them."""
    device = Bus()
    made = streams.DeviceStreams(CUDA, device)
    monkeypatch.setattr(streams.ByDevice, "__getitem__", lambda self, key: made)
    monkeypatch.setattr(passes, "maxima", lambda comm, values: list(values))
    monkeypatch.setattr(passes, "agreed_order", lambda comm, units, ran: units)
    monkeypatch.setattr(hazards, "_tensors", tensors)
    lanes = Lanes(device)
    lanes.patch(monkeypatch, placement)
    monkeypatch.setattr(staging, "ThreadPoolExecutor", lanes.pool)
    monkeypatch.setattr(rank_files, "file_of_rank", lambda folder, rank: File(lanes))
    monkeypatch.setattr(grad_slots, "wait", lanes.wait)
    monkeypatch.setattr(host_params, "is_set", lambda flag: flag.clone() is None)  # a read of the host, of no value
    for module in (grad_slots, host_grads, host_params, staging):
        monkeypatch.setattr(module, "Slab", Pages)
    monkeypatch.setattr(staging, "NUM_SLOTS", 2)  # fewer than units, and so a ring that goes round
    monkeypatch.setattr(staging, "LEAST_SLOT_BYTES", 64)
    Pages.locked.clear()
    plant(monkeypatch)
    with FakeTensorMode():
        with CUDA:
            model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
            for part in model if frozen else ():
                part.weight.requires_grad_(False)
        policy = MixedPrecision(torch.bfloat16 if bfloat16 else None)
        comm = Ranks(world_size, device, rank=min(1, world_size - 1))
        with device:
            zero = Zero(model, stage, units=list(model)[1:], comm=comm, precision=policy, offload=offload)
            device.watch(zero)
            optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
            for step in range(4):
                for micro in range(num_micro):
                    with zero.micro_batch(last=micro == num_micro - 1):
                        model(torch.empty(2, WIDTH, device=CUDA)).sum()
                        backward_events(zero)
                if step % 2:  # the factor is the last to come down: whoever waits for it has waited for the others
                    zero.clip_grad_norm_(1.0)
                with torch.no_grad():
                    model(torch.empty(2, WIDTH, device=CUDA))  # reads weights after all that the host waits for
                optim.step()
                optim.zero_grad()
                for group in (each for each in zero._runtime.groups() if not each.trained):
                    for shard in group.shards:
                        shard.data.fill_(1.0)


def tensors(value):
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if type(leaf) in plain and leaf.layout == torch.strided]


def _away(grads, **others):
    return Offload(grads=grads, path="states" if grads == "disk" else None, **others)


@pytest.mark.redundant(
    but=["1-device-4-disk-True-2", "0-device-4-host-False-1", "3-host-4-disk-False-1", "3-device-4-host-True-2"]
)
@pytest.mark.pairwise("stage", "weights", "num_ranks")
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("grads", ["host", "device", "disk"])
@pytest.mark.parametrize(
    ("stage", "weights", "num_ranks"), [*((stage, "device", 4) for stage in STAGES), (3, "host", 4), (3, "host", 1)]
)
def test_nothing_is_touched_before_what_it_must_wait_for(
    stage,
    weights,
    num_ranks,
    grads,
    bfloat16,
    num_micro,
    guarded,  # noqa: F811
    monkeypatch,
):
    """`_train` raises `Hazard` if it is."""
    _train(monkeypatch, stage, _away(grads, weights=weights), num_ranks, bfloat16=bfloat16, num_micro=num_micro)


SLOT_BYTES = 128  # less than a unit's gradients
BOUND = 4 * SLOT_BYTES  # two slots up and two down


@pytest.mark.redundant(but=["512-4"])
@pytest.mark.pairwise("num_ranks")
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("bound", [None, BOUND])
def test_frozen_weights_that_are_copied_up_are_loaded_once_no_copy_reads_them(
    bound,
    num_ranks,
    guarded,  # noqa: F811
    monkeypatch,
):
    _train(monkeypatch, 3, Offload(weights="host", pinned=bound), num_ranks, frozen=True)
    monkeypatch.setattr(host_params.HostTransport, "wait_for_sent", lambda self: None)
    with pytest.raises(Hazard, match="does not wait for"):
        _train(monkeypatch, 3, Offload(weights="host", pinned=bound), num_ranks, frozen=True)


@pytest.mark.redundant(but=["3-device-1-none is", "0-device-1-slots"])
@pytest.mark.pairwise("stage", "weights")
@pytest.mark.parametrize("bound", [BOUND, BOUND + 10_000, 100], ids=["slots", "some are locked", "none is"])
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize(("stage", "weights"), [*((stage, "device") for stage in STAGES), (3, "host")])
def test_gradients_come_down_through_slots_where_page_locked_memory_is_bounded(
    stage,
    weights,
    num_micro,
    bound,
    guarded,  # noqa: F811
    monkeypatch,
):
    _train(monkeypatch, stage, Offload(weights=weights, pinned=bound), num_micro=num_micro)
    assert sum(Pages.locked) <= bound
    if bound == BOUND:
        assert Pages.locked == [SLOT_BYTES] * (2 if weights == "host" else 4)  # what stays on the host needs none up


class _Never:
    """A mark that nobody waits for."""

    def __init__(self, event):
        self.clock = type(event.clock)()

    def synchronize(self):
        """Do not wait."""


def _landing_not_waited_for(monkeypatch):
    land = host_grads.HostGrads.land

    def landed(self):
        land(self)
        if self._landing is not None:
            self._landing = _Never(self._landing)

    monkeypatch.setattr(host_grads.HostGrads, "land", landed)


def _update_that_does_not_wait_for_the_landing(monkeypatch):
    take_factor = host_grads.HostGrads.take_factor

    def taken(self):
        self._landing = None
        return take_factor(self)

    monkeypatch.setattr(host_grads.HostGrads, "take_factor", taken)


def _copied_down_before_it_is_reduced(monkeypatch):
    on = streams.DeviceStreams.on

    @contextmanager
    def careless(self, lane, *after):
        with on(self, lane, *(() if lane == "to_host" else after)):
            yield

    monkeypatch.setattr(streams.DeviceStreams, "on", careless)


def _slot_written_again_at_once(monkeypatch):
    copy = staging.Staging.copy

    def copied(self, target, source):
        copy(self, target, source)
        self._slots = [(slot, None) for slot, _ in self._slots]

    monkeypatch.setattr(staging.Staging, "copy", copied)


def _weights_written_while_they_are_read(monkeypatch):
    take = host_params.HostTransport.take_update
    monkeypatch.setattr(
        host_params.HostTransport, "take_update", lambda self, full, master, s, after: take(self, full, master, s, None)
    )


def _freed_while_it_is_copied_down(monkeypatch):
    monkeypatch.setattr(staging.Staging, "leaves", lambda self, tensor, copied: None)


def _factor_read_at_once(monkeypatch):
    number = staging.Staging.number
    monkeypatch.setattr(staging.Staging, "number", lambda self, there: (number(self, there)[0], None))


def _comparison_read_at_once(monkeypatch):
    take_check = host_params.HostParams.take_check

    def taken(self):
        self._check = None if self._check is None else (self._check[0], None)
        return take_check(self)

    monkeypatch.setattr(host_params.HostParams, "take_check", taken)


def _gathered_before_it_is_copied_up(monkeypatch):
    take_cast = host_params.HostTransport._take_cast

    def taken(self, streams):
        self._cast_at = None
        return take_cast(self, streams)

    monkeypatch.setattr(host_params.HostTransport, "_take_cast", taken)


def _slot_filled_before_it_is_moved(monkeypatch):
    copy_down = staging.Staging.copy_down

    def copied(self, target, source):
        landing = copy_down(self, target, source)
        for _, moved in self._down:
            moved.clock.clear()
        return landing

    monkeypatch.setattr(staging.Staging, "copy_down", copied)


def _moved_before_it_is_there(monkeypatch):
    moved = staging._moved
    monkeypatch.setattr(staging, "_moved", lambda target, staged, copied: moved(target, staged, _Never(copied)))


def _update_that_does_not_wait_for_slots(monkeypatch):
    monkeypatch.setattr(staging.Landing, "synchronize", lambda self: None)


def _slot_of_gradients_filled_at_once(monkeypatch):
    free_slot = grad_slots.GradSlots._free_slot

    def taken(self, device):
        for _, landing in self._slots:
            for piece in landing.pieces:
                piece.clock = type(piece.clock)()
        return free_slot(self, device)

    monkeypatch.setattr(grad_slots.GradSlots, "_free_slot", taken)


def _written_before_it_is_copied_down(monkeypatch):
    write_input = File.write_input
    monkeypatch.setattr(File, "write_input", lambda self, unit, values, after: write_input(self, unit, values, None))


def _read_from_the_file_before_it_is_there(monkeypatch):
    write_input = File.write_input

    def begun(self, *args):
        pieces, self._arriving = write_input(self, *args), {}
        return pieces

    monkeypatch.setattr(File, "write_input", begun)
    monkeypatch.setattr(staging.Landing, "synchronize", lambda self: None)


PLANTED = {
    "a gradient on the host is read before it is there": (2, "host", _landing_not_waited_for),
    "an update reads a gradient before it is there": (2, "host", _update_that_does_not_wait_for_the_landing),
    "a gradient is copied down before it is reduced": (2, "host", _copied_down_before_it_is_reduced),
    "a slot is written again before it is copied up": (3, "host", _slot_written_again_at_once),
    "weights are written that gathers still read": (3, "host", _weights_written_while_they_are_read),
    "a gradient is freed while it is copied down": (3, "host", _freed_while_it_is_copied_down),
    "written weights are taken before they are compared": (0, "device", _comparison_read_at_once),
    "weights are gathered before they are copied up": (3, "host", _gathered_before_it_is_copied_up),
    "whole weights are read before they are copied up": (0, "host", _gathered_before_it_is_copied_up),
    "a slot is filled before it is moved": (2, "host", _slot_filled_before_it_is_moved, BOUND),
    "a slot is moved before it is filled": (2, "host", _moved_before_it_is_there, BOUND),
    "an update reads a gradient before it is moved": (2, "host", _update_that_does_not_wait_for_slots, BOUND),
    "an update begins before the norm is known": (2, "host", _factor_read_at_once),
    "a slot is filled before it is written to the file": (2, "disk", _slot_of_gradients_filled_at_once),
    "a slot is written to the file before it is filled": (2, "disk", _written_before_it_is_copied_down),
    "a gradient is read from the file before it is there": (2, "disk", _read_from_the_file_before_it_is_there),
    "a gradient goes to the file before it is reduced": (2, "disk", _copied_down_before_it_is_reduced),
    "a gradient is freed on its way to the file": (3, "disk", _freed_while_it_is_copied_down),
    "an update of gradients in the file begins before the norm is known": (2, "disk", _factor_read_at_once),
}


@pytest.mark.redundant(
    but=["a slot is filled before it is moved", "a gradient is read from the file before it is there"]
)
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_seen(what, guarded, monkeypatch):  # noqa: F811
    stage, grads, plant, *bound = PLANTED[what]
    with pytest.raises((Hazard, RuntimeError), match=r"does not wait for|that others still used"):
        _train(monkeypatch, stage, _away(grads, pinned=bound[0] if bound else None), plant=plant)


def _shard_written_while_it_is_copied_up(monkeypatch):
    monkeypatch.setattr(host_params.HostTransport, "wait_for_sent", lambda self: None)


def _copied_up_before_it_is_updated(monkeypatch):
    own = host_params.HostParams.master
    monkeypatch.setattr(host_params.HostParams, "master", property(lambda self: self._master, own.fset))


def _gathered_before_it_is_there(monkeypatch):
    on = streams.DeviceStreams.on

    @contextmanager
    def careless(self, lane, *after):
        with on(self, lane, *(() if lane == "gather" else after)):
            yield

    monkeypatch.setattr(streams.DeviceStreams, "on", careless)


def _computed_with_before_it_is_gathered(monkeypatch):
    monkeypatch.setattr(streams._Issued, "wait", lambda self: None)


def _memory_taken_while_it_is_read(monkeypatch):
    monkeypatch.setattr(streams.DeviceStreams, "freed", lambda self: None)


ON_ONE_RANK = {
    "a shard is written while it is copied up": _shard_written_while_it_is_copied_up,
    "a shard is copied up before it is updated": _copied_up_before_it_is_updated,
    "weights are gathered before they are copied up": _gathered_before_it_is_there,
    "weights are read before they are gathered": _computed_with_before_it_is_gathered,
    "memory of freed weights is taken while they are read": _memory_taken_while_it_is_read,
}


@pytest.mark.parametrize("what", ON_ONE_RANK)
def test_a_mistake_of_one_rank_that_streams_is_seen(what, guarded, monkeypatch):  # noqa: F811
    with pytest.raises((Hazard, RuntimeError), match=r"does not wait for|that others still used"):
        _train(monkeypatch, 3, Offload(weights="host"), 1, plant=ON_ONE_RANK[what])
