"""The engine's step on a GPU that is not there: tensors of ``cuda:0`` without values, of real devices and dtypes.

Nothing of such a tensor can be read: an operation that would have the host wait for the device raises. What a forward
and a backward compute is the model's affair; the engine hears of them as in training, and does its part.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hazards import HazardDevice
from nets import WIDTH
from zeroshard.comm import CONTROL, current_scope
from zeroshard.comm.base import DONE, own_group
from zeroshard.zero import STAGES, MixedPrecision, Zero, streams
from zeroshard.zero.runtime import collective_order

CUDA = torch.device("cuda", 0)
PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "bf16 wire": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


@pytest.fixture
def guarded():
    """torch can index tensors of ``cuda:0``: a CPU build has no guard of that device, and is lent that of ``meta``."""
    if torch.version.cuda is not None:
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 32).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # of `c10::DeviceType`
    before, guards[cuda] = guards[cuda], guards[meta]
    yield
    guards[cuda] = before


@pytest.fixture
def device(guarded, monkeypatch):
    """Streams of ``cuda:0``, on which nothing runs."""
    device = HazardDevice()
    made = streams.DeviceStreams(CUDA, device)
    monkeypatch.setattr(streams.ByDevice, "__getitem__", lambda self, key: made)
    return device


class Peers:
    """Rank 1 of ``world_size``, whose collectives do nothing; what each was given, and on which stream."""

    uniform_order = False
    control_device = torch.device("cpu")

    def __init__(self, world_size, device, issued=None, rank=1):
        self.world_size, self.rank, self._device = world_size, rank, device
        self.issued = [] if issued is None else issued

    def _issue(self, op, *tensors):
        self.issued.append((op, current_scope(), self._device.current.name, tensors))
        return DONE

    def all_reduce(self, tensor, op="sum"):
        return self._issue("all_reduce", tensor)

    def reduce_scatter(self, output, input, op="sum"):
        assert input.numel() == self.world_size * output.numel()
        return self._issue("reduce_scatter", output, input)

    def all_gather(self, output, input):
        assert output.numel() == self.world_size * input.numel()
        return self._issue("all_gather", output, input)

    def broadcast(self, tensor, src):
        return self._issue("broadcast", tensor)

    def split(self, groups):
        _, ranks = own_group(groups, self.rank)
        return Peers(len(ranks), self._device, self.issued, ranks.index(self.rank))


class _Inside(torch.autograd.Function):
    """An operation on the CPU whose backward tells the engine what a model's would."""

    @staticmethod
    def forward(ctx, value, inside):
        ctx.inside = inside
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.inside()
        return grad, None


def _backward(zero):
    """Autograd's events, in their order; a CPU build of torch has no backward for tensors of other devices."""
    runtime = zero._runtime
    run = runtime.forward_run.index

    def grads_of(unit):
        for _, param, group, slot in unit.named_slots():
            runtime.take_grad(group, slot, torch.empty_like(param))

    def inside():
        runtime.backward_begins(runtime.root, run)
        for unit in reversed(runtime.units):
            runtime.backward_begins(unit, run)
            grads_of(unit)
            runtime.backward_ends(unit, run)
        grads_of(runtime.root)

    _Inside.apply(torch.zeros((), requires_grad=True), inside).backward()


@pytest.fixture
def reads(monkeypatch):
    """How often ranks have agreed on flags, which is the one message that a step reads."""
    counted = []
    monkeypatch.setattr(
        collective_order.CollectiveOrder, "_max", lambda self, comm, values: counted.append(comm) or list(values)
    )
    monkeypatch.setattr(collective_order.CollectiveOrder, "agree_on_units", lambda self, units, ran: units)
    return counted


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("stage", "shard_size"), [*((stage, None) for stage in STAGES), (2, 2), (3, 2)])
@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_step_on_a_gpu_reads_nothing_of_it_and_all_that_it_moves_lies_there(
    stage, shard_size, precision, num_micro, device, reads
):
    policy = PRECISIONS[precision]
    with FakeTensorMode():
        comm = Peers(4, device)
        with CUDA:
            model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        zero = Zero(model, stage, units=list(model)[1:], comm=comm, precision=policy, shard_size=shard_size)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        for _ in range(2):
            reads.clear()
            del comm.issued[:]
            for micro in range(num_micro):
                with zero.micro_batch(last=micro == num_micro - 1):
                    model(torch.empty(2, WIDTH, device=CUDA)).sum()
                    _backward(zero)
            norm = zero.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
        assert norm.device == CUDA
        assert all(state["exp_avg"].device == CUDA for state in optim.state.values())
        assert all(group.params.master.dtype == torch.float32 for group in zero._runtime.groups())
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
