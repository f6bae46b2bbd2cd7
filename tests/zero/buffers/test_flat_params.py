import torch
from torch import nn

from zeroshard.comm import NullCommunicator
from zeroshard.zero import STAGES, FlatLayout, MixedPrecision, RankGroups
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.core.layout import ALIGNMENT
from zeroshard.zero.core.weights import PlainTransport, WeightState

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def _of(params, stage, comm=None, precision=None, init=None):
    comm = comm or NullCommunicator(2)
    layout = FlatLayout.of([(name, param.shape) for name, param in params], comm.world_size, ALIGNMENT)
    transport, policy = PlainTransport(comm, layout), precision or MixedPrecision()
    return FlatParams("unit", params, STAGES[stage], RankGroups.of(comm), policy, init, layout, transport)


def _flat(stage, comm=None, precision=None, init=None):
    params = [("a", nn.Parameter(torch.arange(6.0).view(2, 3))), ("b", nn.Parameter(torch.tensor(6.0)))]
    return _of(params, stage, comm, precision, init)


def test_a_freed_weight_is_nan_in_its_shape_and_holds_no_memory():
    flat = _flat(3)
    assert flat.full_bytes == 0
    assert [tuple(param.shape) for param in flat.params] == [(2, 3), ()]
    assert all(param.isnan().all() for param in flat.params)


def test_what_autograd_saved_is_there_again_after_a_gather():
    flat = _flat(3)
    flat.unshard()
    flat.wait_for_unshard()
    saved = flat.params[0].t()
    values = saved.tolist()
    flat.reshard()
    assert saved.untyped_storage().nbytes() == 0
    flat.unshard()
    flat.wait_for_unshard()
    assert saved.tolist() == values
    assert saved.data_ptr() == flat.params[0].data_ptr()


def test_frozen_integers_are_zero_where_they_are_freed():
    params = [("n", nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False))]
    flat = _of(params, 3, precision=BF16)
    assert flat.params[0].tolist() == [0, 0, 0]
    flat.unshard()
    flat.wait_for_unshard()
    assert flat.full.dtype == torch.int64


def test_a_gather_that_an_exception_left_in_flight_does_not_hide_a_later_step():
    flat = _flat(1, precision=BF16)
    for _ in range(2):
        flat.master.add_(1.0)
        flat.mark_stale()
        flat.unshard()  # the first is not waited for: its forward raised
    flat.wait_for_unshard()
    assert flat.state is WeightState.UNSHARDED
    assert flat.full[: flat.master.numel()].tolist() == flat.master.tolist()
