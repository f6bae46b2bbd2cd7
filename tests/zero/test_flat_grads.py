import pytest
import torch

from nets import Net, rows
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero import STAGES, FlatLayout, Levels, Zero
from zeroshard.zero.buffers.flat_grads import FlatGrads

SHAPES = [("a", (2, 2)), ("b", (3,))]


def _grads(stage, comm, reduce_dtype=torch.float32, reduced_dtype=torch.float32):
    return FlatGrads(
        "unit",
        FlatLayout.of(SHAPES, comm.world_size),
        STAGES[stage],
        Levels.of(comm),
        device=torch.device("cpu"),
        reduced_dtype=reduced_dtype,
        reduce_dtype=reduce_dtype,
    )


def _whole(grads, comm):
    """The reduced gradients of all ranks' shards."""
    if grads.reduced.numel() == grads.layout.padded_numel:
        return grads.reduced.clone()
    flat = torch.empty(grads.layout.padded_numel, dtype=grads.reduced.dtype)
    comm.all_gather(flat, grads.reduced).wait()
    return flat


def on_ranks(fn, world_size):
    return run_threads(lambda comm: fn(comm), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_the_mean_over_ranks_of_the_sum_over_micro_batches(stage, world_size):
    def go(comm):
        grads = _grads(stage, comm)
        for scale in (1.0, 2.0):
            grads.accumulate(0, torch.full((2, 2), scale * (comm.rank + 1)))
            grads.accumulate(1, torch.full((3,), scale))
        grads.reduce()
        grads.settle()
        return _whole(grads, comm).tolist()

    mean = 3 * sum(range(1, world_size + 1)) / world_size
    padding = [0.0] * (FlatLayout.of(SHAPES, world_size).padded_numel - 7)
    assert on_ranks(go, world_size) == [[mean] * 4 + [3.0] * 3 + padding] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_that_cancel_leave_nothing(stage, world_size):
    """Also where a third is no number of binary fractions: Adam would make a full step of what is left of rounding."""

    def go(comm):
        grads = _grads(stage, comm)
        for gradient in (-3.0, 3.0):
            grads.accumulate(0, torch.full((2, 2), gradient))
        grads.reduce()
        grads.settle()
        return _whole(grads, comm).tolist()

    nothing = [0.0] * FlatLayout.of(SHAPES, world_size).padded_numel
    assert on_ranks(go, world_size) == [nothing] * world_size


@pytest.mark.parametrize("stage", STAGES)
def test_reductions_add_up_until_they_are_cleared(stage):
    def go(comm):
        grads = _grads(stage, comm)
        for _ in range(3):
            grads.accumulate(0, torch.ones(2, 2))
            grads.reduce()
        grads.settle()
        first = _whole(grads, comm).tolist()
        grads.clear({0, 1})
        assert grads.reduced is None
        assert not grads.pending
        grads.accumulate(1, torch.ones(3))
        grads.reduce()
        grads.settle()
        return first, _whole(grads, comm).tolist()

    for first, second in on_ranks(go, 2):
        assert first == [3.0] * 4 + [0.0] * 4
        assert second == [0.0] * 4 + [1.0] * 3 + [0.0]


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_cleared_before_it_was_reduced_is_forgotten(stage):
    def go(comm):
        grads = _grads(stage, comm)
        grads.accumulate(0, torch.full((2, 2), 7.0))
        grads.clear({0, 1})
        assert not grads.pending
        grads.accumulate(0, torch.ones(2, 2))
        grads.reduce()
        grads.settle()
        return _whole(grads, comm).tolist()

    assert on_ranks(go, 2) == [[1.0] * 4 + [0.0] * 4] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_what_one_rank_alone_has_is_averaged_with_zeros(stage):
    def go(comm):
        grads = _grads(stage, comm)
        for _ in range(2):  # the second time, memory is not fresh
            grads.clear({0, 1})
            if comm.rank == 1:
                grads.accumulate(0, torch.full((2, 2), 6.0))
            grads.reduce()
            grads.settle()
        return _whole(grads, comm).tolist(), grads.used

    by_rank = on_ranks(go, 3)
    assert all(flat == [2.0] * 4 + [0.0] * 5 for flat, _ in by_rank)
    assert [used for _, used in by_rank] == [[False, False], [True, False], [False, False]]


@pytest.mark.parametrize("stage", STAGES)
def test_clearing_one_parameter_leaves_the_other(stage):
    def go(comm):
        grads = _grads(stage, comm)
        grads.accumulate(0, torch.ones(2, 2))
        grads.accumulate(1, torch.ones(3))
        grads.reduce()
        grads.clear({0})
        return _whole(grads, comm).tolist(), grads.used

    assert on_ranks(go, 2) == [([0.0] * 4 + [1.0] * 3 + [0.0], [False, True])] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_zeroed_gradients_are_still_there(stage):
    def go(comm):
        grads = _grads(stage, comm)
        grads.accumulate(0, torch.ones(2, 2))
        grads.reduce()
        grads.settle()
        grads.accumulate(1, torch.ones(3))
        grads.zero({0, 1})
        assert grads.used == [True, True]
        assert grads.pending
        grads.reduce()
        grads.settle()
        return _whole(grads, comm).tolist()

    assert on_ranks(go, 2) == [[0.0] * 8] * 2


def test_gradients_arrive_in_any_dtype_and_sparse():
    grads = _grads(2, LocalCommunicator(), reduce_dtype=torch.float64, reduced_dtype=torch.float64)
    grads.accumulate(0, torch.ones(2, 2, dtype=torch.bfloat16))
    grads.accumulate(0, torch.eye(2).to_sparse())
    grads.reduce()
    grads.settle()
    assert grads.reduced.tolist() == [2, 1, 1, 2, 0, 0, 0]
    assert grads.reduced.dtype == torch.float64


@pytest.mark.parametrize(
    ("stage", "waiting", "reduced"),
    [(0, 32, 32), (1, 32, 32), (2, 32, 16), (3, 32, 16)],
)
def test_whole_gradients_go_where_the_row_shards_them(stage, waiting, reduced):
    grads = _grads(stage, NullCommunicator(2))
    assert grads.resident_bytes == 0
    grads.accumulate(0, torch.ones(2, 2))
    assert grads.resident_bytes == waiting
    grads.reduce()
    grads.settle()
    assert grads.resident_bytes == reduced


@pytest.mark.parametrize("stage", STAGES)
def test_a_reduction_in_fp16_ends_in_the_masters_dtype(stage):
    grads = _grads(stage, NullCommunicator(2), reduce_dtype=torch.float16)
    for _ in range(2):
        grads.accumulate(0, torch.ones(2, 2))
        grads.reduce()
        grads.settle()
        assert grads.reduced.dtype == torch.float32
    assert grads.reduced[:4].tolist() == [2.0] * 4


def test_gradients_with_a_graph_of_their_own_are_taken_without_it():
    grads = _grads(1, NullCommunicator(2))
    grads.accumulate(0, torch.ones(2, 2, requires_grad=True) * 2)
    grads.reduce()
    grads.settle()
    assert not grads.reduced.requires_grad


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_cleared_gradients_hold_no_memory_and_zeroed_ones_do(stage, world_size):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        held = []
        for set_to_none in (True, False):
            net(rows(comm.rank)).square().mean().backward()
            optim.step()
            optim.zero_grad(set_to_none=set_to_none)
            held.append((zero.memory_bytes()["grads"], sum(h.category == "grads" for h in zero.holdings())))
        return held

    for (cleared, num_cleared), (zeroed, num_zeroed) in run_threads(go, world_size):
        assert cleared == num_cleared == 0
        assert zeroed > 0
        assert num_zeroed > 0


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_and_scaling_in_one_pass_as_on_a_gpu_has_the_bits_of_two(world_size, dtype):
    """Where the factor is no power of two, a product in the gradient's own dtype would be rounded to it."""
    gradient = torch.randn(2, 2, generator=torch.Generator().manual_seed(world_size)).to(dtype)
    locals_ = []
    for one_pass in (False, True):
        grads = _grads(2, NullCommunicator(world_size))
        assert grads._scale_on_device is None
        if one_pass:
            grads._scale_on_device = torch.tensor([1 / world_size])
        for _ in range(2):
            grads.accumulate(0, gradient)
            grads.accumulate(1, torch.ones(3, dtype=dtype))
        locals_.append(grads.buffers[0][:7].clone())
    assert torch.equal(*locals_)
