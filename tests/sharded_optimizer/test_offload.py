"""States of a `ShardedOptimizer` on the host or on disk: the same bits, wherever they are and whatever is done."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hazards
from fake_cuda import CUDA, guarded  # noqa: F401 -- a fixture
from hazards import Hazard
from sharded_optimizer.test_sharded_optimizer import Mixed, average, tokens
from zero.offload.test_offload import same
from zero.offload.test_races import Bus, Pages, tensors
from zeroshard.comm import LocalCommunicator, run_threads, streams
from zeroshard.errors import UserError
from zeroshard.finalizers import settle
from zeroshard.sharded_optimizer import away
from zeroshard.zero import Offload, ShardedOptimizer
from zeroshard.zero.offload import disk
from zeroshard.zero.offload.disk import extent_bytes

NUM_STEPS = 6


class Own(torch.optim.SGD):
    """A class from elsewhere, which counts its steps: it steps once, on all parameters."""

    num_steps = 0
    zero_reach = "element-wise"

    def step(self, closure=None):
        self.num_steps += 1
        self.param_groups[0]["lr"] /= self.num_steps
        return super().step(closure)


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "from elsewhere": (Own, {"momentum": 0.9}),
}
PLACES = {
    "host": {},
    "half": {"fraction": 0.5},
    "disk": {"optimizer": "disk", "path": "files"},
    "half on disk": {"optimizer": "disk", "path": "files", "fraction": 0.5},
}
AROUND = ["", "overflow", "accumulation", "closure", "writes", "loads", "hooks"]


def _train(comm, optimizer, around, settings):
    model = Mixed()
    model.blocks[0].weight.data = model.blocks[0].weight.data.t()  # in another order in memory
    cls, given = OPTIMIZERS[optimizer]
    late = list(model.late.parameters())
    params = [p for p in model.parameters() if all(p is not other for other in late)]
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 5e-3}]
    optim = ShardedOptimizer(groups, cls, comm=comm, lr=1e-2, **given, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    if around == "hooks":
        optim.optim.register_step_pre_hook(lambda inner, *_: inner.param_groups[0].update(lr=2e-3))
    found, norms = [], []
    for step in range(NUM_STEPS):
        if step == 2:
            optim.add_param_group({"params": late, "lr": 2e-2})

        def computed(step=step, optim=optim):
            optim.zero_grad()
            for micro in range(1 + (around == "accumulation")):
                loss = model(tokens(comm.rank, 10 * step + micro), all_of_it=step % 2 == 0)
                if around == "overflow":
                    loss = scaler.scale(loss * float("inf") if step == 3 else loss)
                loss.backward()
            average(comm, list(model.parameters()))
            if around == "overflow":
                scaler.unscale_(optim)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).clone())
            return loss.detach()

        if around == "closure":
            found.append(optim.step(computed))
        else:
            computed()
            (scaler.step if around == "overflow" else lambda each: each.step())(optim)
            scaler.update() if around == "overflow" else None
        if around == "writes":
            model.norm.weight.data.mul_(1.5)
            for value in optim.state.get(model.blocks[1].weight, {}).values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(0.5)
        if around == "loads" and step in (1, 3):
            optim = _reloaded(comm, optim, cls, {**given, **settings})
        found += [param.detach().clone() for param in model.parameters()]
    return [*found, *norms, _consolidated(optim)]


def _consolidated(optim):
    for rank in range(optim.comm.world_size):
        optim.consolidate_state_dict(rank)
        if optim.comm.rank == rank:
            found = optim.state_dict()
    return found


def _reloaded(comm, optim, cls, settings):
    """Another optimizer over the same parameters, with the states of this one."""
    state = _consolidated(optim)
    groups = [{"params": list(group["params"])} for group in optim.param_groups]
    optim.optim.state.clear()  # its file is removed with the last view of it
    if optim._away is not None and optim._away._file is not None:
        optim._away._file.close()
    made = ShardedOptimizer(groups, cls, comm=comm, lr=1.0, **settings)
    made.load_state_dict(state)
    made.load_state_dict(state)  # over what is there
    return made


@pytest.mark.pairwise("place", "copies", "bucket_bytes")
@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
@pytest.mark.parametrize("copies", [False, True], ids=["in place", "as on a GPU"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_bits_are_those_without_offloading(
    world_size, optimizer, around, place, copies, bucket_bytes, monkeypatch, tmp_path
):
    offload = Offload(**{"grads": "device", **PLACES[place]} | ({"path": tmp_path} if "path" in PLACES[place] else {}))
    expected = run_threads(lambda comm: _train(comm, optimizer, around, {}), world_size, timeout_s=120)
    if copies:
        monkeypatch.setattr(away.StatesAway, "stands_in", lambda self, param: param in self._away)
    settings = {"offload": offload, "bucket_bytes": bucket_bytes}
    found = run_threads(lambda comm: _train(comm, optimizer, around, settings), world_size, timeout_s=120)
    for mine, theirs in zip(found, expected, strict=True):
        assert same(mine, theirs)
    gc.collect()
    settle()
    assert not list(tmp_path.iterdir())


def _alone(params, offload, cls=torch.optim.AdamW, **settings):
    return ShardedOptimizer(params, cls, comm=LocalCommunicator(), lr=1e-2, offload=offload, **settings)


def test_states_are_in_a_file_of_exact_size_and_a_bucket_of_them_in_memory(tmp_path):
    params = [nn.Parameter(torch.ones(100, 10)) for _ in range(8)]
    params[0].data = params[0].data.view(10, 100).t()
    optim = _alone(params, Offload("disk", "disk", "device", path=tmp_path), bucket_bytes=8000)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optim.step()
    (path,) = tmp_path.iterdir()
    file = optim._away._file
    bucket = extent_bytes([(1000, torch.float32)] * 4)
    assert path.stat().st_size == file.num_bytes == 4 * bucket
    assert file.slot_bytes == 3 * bucket
    assert file.bytes_read == 4 * bucket  # of the second step: the first has made the states
    values = [value for state in optim.state.values() for value in state.values() if value.dim()]
    assert len(values) == 16
    assert len({value.untyped_storage().data_ptr() for value in values}) == 4
    with pytest.raises(UserError, match=r"^offload.path: .*rank-00000.states is in use by another run"):
        _alone(params, Offload("disk", "disk", "device", path=tmp_path))


REFUSED = {
    r"^offload: 'host' is no Offload; give zeroshard.zero.Offload\(grads='device'\)": ("host", {}),
    r"^offload.grads: 'host', and a ShardedOptimizer leaves gradients where the model has them": (Offload(), {}),
    r"^offload.weights: 'host', and a .* leaves weights .*; give weights='device', or use zeroshard.Zero": (
        Offload(grads="device", weights="host"),
        {},
    ),
    r"^capturable: no graph of a GPU has updates on the host": (Offload(grads="device"), {"capturable": True}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_leave_is_refused_in_one_line(message):
    offload, settings = REFUSED[message]
    with pytest.raises((TypeError, ValueError), match=message):
        _alone([nn.Parameter(torch.ones(2))], offload, **settings)


# -- a GPU that is not there ------------------------------------------------------------------------------------------


def _on_a_gpu(monkeypatch, cls=torch.optim.AdamW, **settings):
    bus = Bus()
    made = streams.DeviceStreams(CUDA, bus)
    monkeypatch.setattr(streams.ByDevice, "__getitem__", lambda self, key: made)
    monkeypatch.setattr(hazards, "_tensors", tensors)
    locked = []

    class Slab(Pages):
        def __init__(self, num_bytes, *, device, pinned):
            super().__init__(num_bytes, device=device, pinned=pinned)
            self.is_pinned = pinned
            locked.append(pinned * num_bytes)

    monkeypatch.setattr(away, "Slab", Slab)
    with FakeTensorMode(), bus:
        params = [nn.Parameter(torch.empty(100, device=CUDA)) for _ in range(6)]
        given = {"momentum": 0.9} if cls is Own else {}
        optim = _alone(params, Offload(grads="device", **settings), cls, bucket_bytes=800, **given)
        for _ in range(3):
            for param in params:
                param.grad = torch.empty(100, device=CUDA)
            optim.step()
            with torch.no_grad():
                for param in params:
                    param.mul_(1.0)
        kept = {value.device.type for state in optim.state.values() for value in state.values()}
        optim._away.load(optim.optim, optim.optim.state_dict())
        assert kept == {value.device.type for state in optim.state.values() for value in state.values()} == {"cpu"}
    return locked


@pytest.mark.parametrize("pinned", [None, 1700, 100])
def test_states_stay_on_the_host_and_every_copy_is_waited_for(pinned, guarded, monkeypatch):  # noqa: F811
    two_of_each = 2 * 2 * 448  # of two weights and gradients, each in whole cache lines
    locked = _on_a_gpu(monkeypatch, pinned=pinned)
    assert locked == [0 if pinned is not None else two_of_each]
    if pinned is None:
        _on_a_gpu(monkeypatch, Own)


def test_an_update_that_does_not_wait_for_copies_down_is_seen(guarded, monkeypatch):  # noqa: F811
    monkeypatch.setattr(away.StatesAway, "_wait", lambda self, params: None)
    with pytest.raises(Hazard, match="does not wait for"):
        _on_a_gpu(monkeypatch)


def test_a_step_ends_when_its_states_are_in_the_file(monkeypatch, tmp_path):
    write, written = disk._write, []

    def slowly(*what):
        time.sleep(0.02)
        write(*what)
        written.append(what)

    monkeypatch.setattr(disk, "_write", slowly)
    torch.manual_seed(0)
    there = [nn.Parameter(torch.randn(300, 7)) for _ in range(4)]
    here = [nn.Parameter(param.detach().clone()) for param in there]
    place = Offload(optimizer="disk", grads="device", path=str(tmp_path))
    optimizers = [
        ShardedOptimizer(there, torch.optim.AdamW, comm=LocalCommunicator(), offload=place),
        torch.optim.AdamW(here),
    ]
    for _ in range(3):
        for params, optimizer in zip((there, here), optimizers, strict=True):
            for number, param in enumerate(params):
                param.grad = torch.full_like(param, number + 1.0)
            optimizer.step()
        for one, other in zip(there, here, strict=True):
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizers[0].state[one][kind], optimizers[1].state[other][kind])
    assert written
