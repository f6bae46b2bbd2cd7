"""A GPU that is not there: tensors of ``cuda:0`` without values, of real devices and dtypes, and a rank on it.

Nothing of such a tensor can be read: an operation that would have the host wait for the device raises. What a forward
and a backward compute is the model's affair; the engine hears of them as in training, and does its part.
"""

import ctypes
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hazards import HazardDevice
from nets import WIDTH
from zeroshard.comm import current_label, streams
from zeroshard.comm.base import DONE, own_group
from zeroshard.zero.core import passes
from zeroshard.zero.guards import collective_order

CUDA = torch.device("cuda", 0)


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
        self.issued.append((op, current_label(), self._device.current.name, tensors))
        return DONE

    def all_reduce(self, tensor, op="sum"):
        return self._issue("all_reduce", tensor)

    def reduce_scatter(self, output, input, op="sum"):
        assert input.numel() == self.world_size * output.numel()
        return self._issue("reduce_scatter", output, input)

    def all_gather(self, output, input):
        assert output.numel() == self.world_size * input.numel()
        return self._issue("all_gather", output, input)

    def all_to_all(self, output, input):
        assert output.numel() == input.numel()
        return self._issue("all_to_all", output, input)

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


def backward_events(zero):
    """Autograd's events, in their order; a CPU build of torch has no backward for tensors of other devices."""
    runtime = zero._runtime
    run = runtime.forward

    def grads_of(unit):
        for _, param, group, slot in unit.named_slots():
            if param.requires_grad:
                runtime.expect_grad()
                group.grads.accumulate(slot, torch.empty_like(param))

    def inside():
        runtime.pre_backward(runtime.root, run)
        for unit in reversed(runtime.units):
            runtime.pre_backward(unit, run)
            grads_of(unit)
            runtime.post_backward(unit, run)
        grads_of(runtime.root)

    _Inside.apply(torch.zeros((), requires_grad=True), inside).backward()


def unscaled_step(zero, model, num_micro):
    """Forwards and backwards of a step, and what `torch.amp.GradScaler.unscale_` does after them."""
    for micro in range(num_micro):
        with zero.micro_batch(last=micro == num_micro - 1):
            model(torch.empty(2, WIDTH, device=CUDA)).sum()
            backward_events(zero)
    found_inf, inverse_scale = torch.zeros(1, device=CUDA), torch.ones(1, device=CUDA)
    grads = [param.grad for param in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)


class Waits(TorchDispatchMode):
    """Copies between host and device inside of this block for which the host waits until the device is there.

    Either way: of what it takes from the device, and of what it gives it out of memory that is not pinned, a list of
    numbers say. Where the host reads a number of the device, torch's fake tensors raise.
    """

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            target, source = result.device.type, (args[1] if len(args) > 1 else args[0]).device.type
            ahead = target == "cuda" and kwargs.get("non_blocking", args[2:] == (True,))
            if target != source and not ahead:
                self.seen.append(f"{source} to {target}")
        return result


@pytest.fixture
def reads(monkeypatch):
    """How often ranks have agreed on flags, which is the one message that a step reads."""
    counted = []
    for module in (passes, collective_order):  # replicas compare their gathers in a further one
        monkeypatch.setattr(module, "maxima", lambda comm, values: counted.append(comm) or list(values))
    monkeypatch.setattr(passes, "agreed_order", lambda comm, units, ran: units)
    return counted
