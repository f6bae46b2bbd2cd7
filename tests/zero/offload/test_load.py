"""A load of states that are in the rank's file needs memory for one unit's, and finds the places that are there."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import nn

import zeroshard
from live_bytes import LiveBytes
from nets import Net, rows
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.zero import Offload, Zero
from zeroshard.zero.offload import disk

WIDTH, NUM_UNITS = 256, 24
UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
NUMEL = {"fp32": 4, "bf16": 2, "int8": 1}


class InFile:
    """Storages that show the file, by where it is mapped."""

    def __init__(self, monkeypatch):
        self._mapped, add = [], disk.DiskStates._add

        def added(states, *args, **kwargs):
            extent, pages = add(states, *args, **kwargs)
            self._mapped.append((ctypes.addressof(ctypes.c_char.from_buffer(pages)), extent.num_bytes))
            return extent, pages

        monkeypatch.setattr(disk.DiskStates, "_add", added)

    def __call__(self, storage):
        return any(start <= storage.data_ptr() < start + size for start, size in self._mapped)


def _engine(offload, state_format="fp32"):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_UNITS)))
    zero = Zero(model, 2, units=list(model), comm=NullCommunicator(1), offload=offload)
    return model, zero, zero.optimizer(torch.optim.AdamW, lr=1e-2, state_format=state_format)


def _step(model, optim):
    model(torch.ones(2, WIDTH)).square().sum().backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.redundant(but=["at the start-fp32", "at the start-int8"])
@pytest.mark.pairwise("state_format")
@pytest.mark.parametrize("state_format", NUMEL)
@pytest.mark.parametrize("again", [False, True], ids=["at the start", "between steps"])
def test_a_load_has_the_states_of_one_unit_in_memory(state_format, again, tmp_path, monkeypatch):
    in_file = InFile(monkeypatch)
    model, zero, optim = _engine(None, state_format)
    _step(model, optim)
    zeroshard.save(tmp_path / "saved", zero, step=1)
    plain = zero.optim_state_dict(optim)
    for place in ("disk", "host"):
        files = {"path": tmp_path / "files"} if place == "disk" else {}
        model, zero, optim = _engine(Offload(place, place, **files), state_format)
        if again:
            _step(model, optim)
            zero.state_dict()  # the update is over
        file = zero._runtime.groups()[0].stored.file if place == "disk" else None
        size = None if file is None else file.num_bytes
        with LiveBytes(in_file) as live:
            zeroshard.load(tmp_path / "saved", zero)
        all_states = 2 * NUM_UNITS * UNIT_BYTES * NUMEL[state_format] // 4
        if file is not None:  # read, as kept and as the class takes them, of one unit; and that unit's weights
            assert live.peak <= 8 * UNIT_BYTES
            assert not again or file.num_bytes == size  # in the places that were there
        else:
            assert live.peak >= all_states
        loaded = zero.optim_state_dict(optim)
        assert loaded["state"].keys() == plain["state"].keys()
        for number, state in plain["state"].items():
            assert state.keys() == loaded["state"][number].keys()
            assert all(torch.equal(value, loaded["state"][number][kind]) for kind, value in state.items())


@pytest.mark.redundant
def test_two_optimizers_of_one_unit_load_each_its_own(tmp_path):
    def made(comm, offload):
        net = Net(3)
        zero = Zero(net, 2, units=list(net.blocks), comm=comm, offload=offload)
        biases = [param for param in net.parameters() if param.dim() == 1]
        weights = [param for param in net.parameters() if param.dim() == 2]
        return net, zero, [zero.optimizer(torch.optim.AdamW, given, lr=1e-2) for given in (biases, weights)]

    def trained(comm, offload, begins, saves):
        net, zero, optims = made(comm, offload)
        for path in begins:
            zeroshard.load(tmp_path / path, zero)
        for step in range(3):
            net(rows(comm.rank, step)).square().mean().backward()
            for optim in optims:
                optim.step()
                optim.zero_grad()
        zeroshard.save(tmp_path / saves, zero, step=3)
        return zero.state_dict(), [zero.optim_state_dict(optim) for optim in optims]

    def run(*args):
        return run_threads(lambda comm: trained(comm, *args), 2, timeout_s=120)

    run(None, (), "first")
    plain = run(None, ("first", "first"), "plain")
    away = run(Offload("disk", "disk", path=tmp_path / "files"), ("first", "first"), "away")
    for ours, theirs in zip(away, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
