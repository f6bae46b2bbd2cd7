import pytest
import torch
from torch import nn

from zeroshard.comm import LocalCommunicator, NullCommunicator
from zeroshard.zero import STAGES, Levels, MixedPrecision
from zeroshard.zero.buffers.flat_params import FlatParams

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def _flat(stage, comm=None, precision=None, init=None):
    params = [("a", nn.Parameter(torch.arange(6.0).view(2, 3))), ("b", nn.Parameter(torch.tensor(6.0)))]
    levels = Levels.of(comm or NullCommunicator(2))
    return FlatParams("unit", params, STAGES[stage], levels, precision or MixedPrecision(), init)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_views_of_one_padded_buffer(stage):
    flat = _flat(stage)
    assert flat.full.tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert [tuple(param.shape) for param in flat.params] == [(2, 3), ()]
    flat.full.fill_(9)
    assert all(param.eq(9).all() for param in flat.params)


def test_a_freed_weight_is_nan_in_its_shape_and_holds_no_memory():
    flat = _flat(3)
    assert flat.full_bytes == 0
    assert [tuple(param.shape) for param in flat.params] == [(2, 3), ()]
    assert all(param.isnan().all() for param in flat.params)


def test_what_autograd_saved_is_whole_again_after_a_gather():
    flat = _flat(3)
    flat.gather()
    flat.wait()
    saved = flat.params[0].t()
    values = saved.tolist()
    flat.release()
    assert saved.untyped_storage().nbytes() == 0
    flat.gather()
    flat.wait()
    assert saved.tolist() == values
    assert saved.data_ptr() == flat.params[0].data_ptr()


def test_a_gather_that_is_not_needed_does_nothing():
    flat = _flat(1)
    flat.full.fill_(5)
    flat.gather()
    flat.wait()
    assert flat.full.eq(5).all()
    flat.mark_stale()
    flat.gather()
    flat.gather()
    flat.wait()
    assert not flat.stale


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_holds_the_whole_at_every_stage(stage):
    flat = _flat(stage, LocalCommunicator())
    flat.release()
    assert flat.full_bytes == 7 * 4
    assert flat.master_bytes == 0
    assert flat.master.data_ptr() == flat.full.data_ptr()
    flat.mark_stale()
    assert not flat.stale


@pytest.mark.parametrize(
    ("stage", "precision", "full_bytes", "master_bytes"),
    [
        (0, None, 32, 0),
        (1, None, 32, 0),
        (3, None, 0, 16),
        (0, BF16, 16, 32),
        (2, BF16, 16, 16),
        (3, BF16, 0, 16),
    ],
)
def test_a_master_is_a_view_of_the_weights_where_it_can_be(stage, precision, full_bytes, master_bytes):
    flat = _flat(stage, precision=precision)
    assert (flat.full_bytes, flat.master_bytes) == (full_bytes, master_bytes)
    assert flat.master.dtype == torch.float32


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_update_of_the_master_is_seen_after_a_gather(stage, precision):
    flat = _flat(stage, NullCommunicator(2, 1), precision)
    flat.master.add_(10)
    flat.mark_stale()
    flat.gather()
    flat.wait()
    shard = flat.full[4:].tolist()
    assert shard == [14, 15, 16, 10]  # padding is nobody's, and follows its master


@pytest.mark.parametrize("stage", STAGES)
def test_pieces_are_those_of_this_rank_or_of_every_rank(stage):
    flat = _flat(stage, NullCommunicator(2, 1))
    found = [(piece.slot, piece.interval, flat.piece_of_master(piece).tolist()) for piece in flat.pieces]
    own = [(0, (4, 6), [4, 5]), (1, (0, 1), [6])]
    assert found == (own if stage else [(0, (0, 4), [0, 1, 2, 3]), *own])


def test_init_fills_each_parameter_in_place_and_in_the_masters_dtype():
    asked = []

    def init(name, tensor):
        asked.append((name, tuple(tensor.shape), tensor.dtype))
        tensor.fill_(len(asked))

    flat = _flat(1, precision=BF16, init=init)
    assert asked == [("a", (2, 3), torch.float32), ("b", (), torch.float32)]
    assert flat.full.tolist() == [1, 1, 1, 1, 1, 1, 2, 0]
    assert flat.full.dtype == torch.bfloat16


def test_frozen_integers_are_zero_where_they_are_freed():
    params = [("n", nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False))]
    flat = FlatParams("unit", params, STAGES[3], Levels.of(NullCommunicator(2)), BF16, None)
    assert flat.params[0].tolist() == [0, 0, 0]
    flat.gather()
    flat.wait()
    assert flat.full.dtype == torch.int64


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_shards_lie_where_kernels_read_fast(stage, dtype):
    params = [(name, nn.Parameter(torch.ones(shape, dtype=dtype))) for name, shape in [("a", ()), ("b", (33, 41))]]
    flat = FlatParams("unit", params, STAGES[stage], Levels.of(NullCommunicator(3, 1)), MixedPrecision(), None)
    flat.gather()
    flat.wait()
    assert flat.params[1].data_ptr() % 16 == 0
    assert flat.master.data_ptr() % 16 == 0
    assert flat.layout.interval(1)[0] * dtype.itemsize % 16 == 0
