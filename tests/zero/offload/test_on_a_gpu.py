"""State off a GPU that is not there: what is copied either way, on which stream, and what the host waits for."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_cuda import CUDA, Peers, Waits, backward_events, device, guarded, reads  # noqa: F401 -- fixtures
from nets import WIDTH
from zero.offload.executors import AtOnce
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero
from zeroshard.zero.offload import host_grads, host_params, placement, staging


class Pages:
    """A slab of ordinary memory."""

    def __init__(self, num_bytes, *, device, pinned):  # noqa: F811
        self.num_bytes = num_bytes

    def take(self, numel, dtype):
        assert numel * dtype.itemsize <= self.num_bytes
        return torch.empty(numel, dtype=dtype)


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
    monkeypatch.setattr(host_params, "bit_sums", lambda values: torch.zeros(1))  # whose comparison reads the device
    for module in (host_grads, host_params, staging):
        monkeypatch.setattr(module, "Slab", Pages)
    policy = MixedPrecision(torch.bfloat16 if bfloat16 else None)
    with FakeTensorMode(), Waits():
        monkeypatch.setattr(torch, "equal", lambda a, b: True)
        comm = Peers(4, device)
        with CUDA:
            model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        offload = Offload(grads=grads, weights=weights)
        zero = Zero(model, stage, units=list(model)[1:], comm=comm, precision=policy, offload=offload)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            for micro in range(num_micro):
                with zero.micro_batch(last=micro == num_micro - 1):
                    model(torch.empty(2, WIDTH, device=CUDA)).sum()
                    backward_events(zero)
            found_inf, inverse_scale = torch.zeros(1, device=CUDA), torch.ones(1, device=CUDA)
            torch._amp_foreach_non_finite_check_and_unscale_(
                [param.grad for param in model.parameters()], found_inf, inverse_scale
            )
            assert zero.clip_grad_norm_(1.0).device.type == "cuda"
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).device.type == "cuda"
            assert all(grad.device.type == "cuda" for grad in zero.full_grads().values())
            optim.step()
            optim.zero_grad()
        for group in (group for unit in zero.units for group in unit.groups):
            assert group.params.master.device.type == "cpu"
            assert group.params.full.device.type == "cuda"
        assert {value.device.type for state in optim.state.values() for value in state.values()} == {"cpu"}
        for holding in zero.holdings():
            assert holding.tensor.device.type == ("cpu" if holding.category.startswith("host_") else "cuda")
        zero.state_dict()
