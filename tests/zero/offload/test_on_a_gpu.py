"""State off a GPU that is not there: what is copied either way, on which stream, and what the host waits for."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_cuda import (  # noqa: F401 -- fixtures
    CUDA,
    Peers,
    Waits,
    backward_events,
    device,
    guarded,
    reads,
    unscaled_step,
)
from hazards import _Event
from nets import WIDTH
from zero.offload.executors import AtOnce, Late
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero
from zeroshard.zero.offload import host_grads, host_params, placement, staging


class Pages:
    """A slab of ordinary memory."""

    def __init__(self, num_bytes, *, device, pinned):  # noqa: F811
        self.num_bytes = num_bytes

    def take(self, numel, dtype):
        assert numel * dtype.itemsize <= self.num_bytes
        return torch.empty(numel, dtype=dtype)


class BlockingCopies(Waits):
    """As `Waits`; but the memory of the host is page-locked, so that the host does not wait for copies down either."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        num_seen = len(self.seen)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.seen) > num_seen and ((kwargs or {}).get("non_blocking") or args[2:] == (True,)):
            self.seen.pop()
        return result


def _engine(device, stage, policy, offload, monkeypatch):  # noqa: F811
    monkeypatch.setattr(host_params, "is_set", lambda flag: False)
    for module in (host_grads, host_params, staging):
        monkeypatch.setattr(module, "Slab", Pages)
    with CUDA:
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    comm = Peers(4, device)
    zero = Zero(model, stage, units=list(model)[1:], comm=comm, precision=policy, offload=offload)
    return model, zero, zero.optimizer(torch.optim.AdamW, lr=1e-3)


@pytest.mark.redundant(
    but=["0-device-1-False-device", "3-host-2-True-host", "1-device-1-True-host", "2-device-2-False-device"]
)
@pytest.mark.pairwise("stage", "weights")
@pytest.mark.parametrize("grads", ["device", "host"])
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize(("stage", "weights"), [*((stage, "device") for stage in STAGES), (3, "host")])
def test_masters_states_and_gradients_are_on_the_host_and_weights_on_the_device(
    stage,
    num_micro,
    bfloat16,
    grads,
    weights,
    device,  # noqa: F811
    reads,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(placement, "Executor", AtOnce)
    policy = MixedPrecision(torch.bfloat16 if bfloat16 else None)
    with FakeTensorMode(), Waits():
        model, zero, optim = _engine(device, stage, policy, Offload(grads=grads, weights=weights), monkeypatch)
        for _ in range(2):
            unscaled_step(zero, model, num_micro)
            assert zero.clip_grad_norm_(1.0).device.type == "cuda"
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).device.type == "cuda"
            assert all(grad.device.type == "cuda" for grad in zero.full_grads().values())
            optim.step()
            optim.zero_grad()
        for group in (group for unit in zero.units for group in unit.groups):
            assert group.params.master.device.type == "cpu"
            assert group.params.full.device.type == "cuda"
            if not group.params.shard_optim:  # no piece ends in the tail of a vector of the host
                assert group.params.pieces == group.params.layout.updated_by_all(torch.device("cpu"))
        assert {value.device.type for state in optim.state.values() for value in state.values()} == {"cpu"}
        for holding in zero.holdings():
            assert holding.tensor.device.type == ("cpu" if holding.category.startswith("host_") else "cuda")
        zero.state_dict()


@pytest.mark.redundant(but=["1-host"])
@pytest.mark.pairwise("stage")
@pytest.mark.parametrize("grads", ["device", "host"])
@pytest.mark.parametrize("stage", STAGES)
def test_backward_clip_and_step_wait_for_no_gradient_on_its_way_to_the_host(
    stage,
    grads,
    device,  # noqa: F811
    reads,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(placement, "Executor", Late)
    waited = []
    monkeypatch.setattr(_Event, "synchronize", lambda event: waited.append(event))
    with FakeTensorMode(), BlockingCopies() as copies:
        model, zero, optim = _engine(device, stage, MixedPrecision(), Offload(grads=grads), monkeypatch)
        for _ in range(2):
            zero.state_dict()
            waited.clear()
            copies.seen.clear()
            model(torch.empty(2, WIDTH, device=CUDA)).sum()
            waited.clear()  # updates that the forward has waited for
            backward_events(zero)
            zero.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
            assert (waited, copies.seen) == ([], [])
        zero.state_dict()
        assert waited


def test_a_norm_is_computed_again_after_a_gradient_was_written(device, reads, monkeypatch):  # noqa: F811
    with FakeTensorMode():
        model, zero, _ = _engine(device, 2, MixedPrecision(), Offload(), monkeypatch)
        model(torch.empty(2, WIDTH, device=CUDA)).sum()
        backward_events(zero)
        grads = zero.units[1].groups[0].grads
        known = grads.norms(2.0)
        assert grads.norms(2.0) is known
        model[1].weight.grad.mul_(2.0)
        assert grads.norms(2.0) is not known


def test_gradients_that_are_assigned_land_after_the_update_that_reads_the_last_ones(device, reads, monkeypatch):  # noqa: F811
    monkeypatch.setattr(placement, "Executor", Late)
    with FakeTensorMode():
        model, zero, optim = _engine(device, 2, MixedPrecision(), Offload(), monkeypatch)
        model(torch.empty(2, WIDTH, device=CUDA)).sum()
        backward_events(zero)
        optim.step()
        optim.zero_grad()
        update, pending = zero.units[1].groups[0].update, []
        assert update.pending
        monkeypatch.setattr(staging.Staging, "leaves", lambda self, tensor, copied: pending.append(update.pending))
        model[1].weight.grad = torch.empty_like(model[1].weight)
        zero.clip_grad_norm_(1.0)
        assert pending == [False]
