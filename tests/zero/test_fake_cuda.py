"""The engine's step on a GPU that is not there: what it moves lies there, in its kind's dtype, and nothing is read."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fake_cuda import CUDA, Peers, Waits, device, guarded, reads, unscaled_step  # noqa: F401 -- fixtures
from nets import WIDTH
from zeroshard.comm import CONTROL, LocalCommunicator
from zeroshard.optim import LossScaler
from zeroshard.zero import STAGES, MixedPrecision, Zero

PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "bf16 wire": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


@pytest.mark.redundant(but=["1-0-None-None-fp32", "1-2-2-None-bf16"])
@pytest.mark.pairwise("stage", "num_micro")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("stage", "shard_size", "reproducible"),
    [*((stage, None, reproducible) for stage in STAGES for reproducible in (None, 4)), (2, 2, None), (3, 2, None)],
)
@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_step_on_a_gpu_reads_nothing_of_it_and_all_that_it_moves_lies_there(
    stage,
    shard_size,
    reproducible,
    precision,
    num_micro,
    device,  # noqa: F811
    reads,  # noqa: F811
):
    policy = PRECISIONS[precision]
    how = {"shard_size": shard_size, "reproducible": reproducible}
    with FakeTensorMode(), Waits() as waits:
        comm = Peers(4, device)
        with CUDA:
            model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        zero = Zero(model, stage, units=list(model)[1:], comm=comm, precision=policy, **how)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        for _ in range(2):
            reads.clear()
            waits.seen.clear()
            del comm.issued[:]
            unscaled_step(zero, model, num_micro)
            norm = zero.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
        assert norm.device == CUDA
        assert all(state["exp_avg"].device == CUDA for state in optim.state.values())
        assert all(group.params.master.dtype == torch.float32 for group in zero._runtime.groups())
    assert waits.seen == []
    num_reducing = num_micro if zero.accumulate == "sharded" else 1
    assert len(reads) == num_reducing * (2 if shard_size else 1)
    policy = policy or MixedPrecision()
    dtypes = {"weights": policy.compute_dtype(torch.float32), "grads": policy.gradient_dtype(torch.float32)}
    seen = set()
    for op, label, stream, tensors in comm.issued:
        assert all(tensor.device == CUDA for tensor in tensors), (op, label)
        kind = label.split("/")[-1]
        seen.add(kind)
        if kind in dtypes:
            assert {tensor.dtype for tensor in tensors} == {dtypes[kind]}, (op, label)
            assert stream.startswith("lane"), (op, label)
    assert seen == {"grads", *(["weights", CONTROL] if stage else [])}


def test_a_loss_scale_on_a_gpu_reads_one_flag(guarded, monkeypatch):  # noqa: F811
    monkeypatch.setattr(FakeTensor, "item", lambda flag: 0.0)
    with FakeTensorMode(), Waits() as waits:
        param = torch.nn.Parameter(torch.empty(4, device=CUDA))
        param.grad = torch.empty(4, device=CUDA)
        assert LossScaler(LocalCommunicator()).unscale_(torch.optim.SGD([param]))
    assert waits.seen == ["cuda to cpu"]
