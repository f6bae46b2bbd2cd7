import pytest
import torch

from nets import Net, rows
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.host.torch_internals import storage_id
from zeroshard.zero import STAGES, FlatLayout, RankGroups, Zero
from zeroshard.zero.core import small_grads
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.runtime.grad_hooks import put

SHAPES = [("a", (2, 2)), ("b", (3,))]


def _grads(stage, comm, reduce_dtype=torch.float32, reduced_dtype=torch.float32):
    return Gradients(
        "unit",
        FlatLayout.of(SHAPES, comm.world_size),
        STAGES[stage],
        RankGroups.of(comm),
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


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_the_mean_over_ranks_of_the_sum_over_micro_batches(stage, world_size):
    def go(comm):
        grads = _grads(stage, comm)
        for scale in (1.0, 2.0):
            grads.accumulate(0, torch.full((2, 2), scale * (comm.rank + 1)))
            grads.accumulate(1, torch.full((3,), scale))
        grads.reduce()
        grads.wait_for_reduce()
        return _whole(grads, comm).tolist()

    mean = 3 * sum(range(1, world_size + 1)) / world_size
    padding = [0.0] * (FlatLayout.of(SHAPES, world_size).padded_numel - 7)
    assert run_threads(go, world_size) == [[mean] * 4 + [3.0] * 3 + padding] * world_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_that_cancel_leave_nothing(stage, world_size, dtype):
    """Also where a third is no number of binary fractions: Adam would make a full step of what is left of rounding."""

    def go(comm):
        grads = _grads(stage, comm, dtype, dtype)
        for gradient in (-3.1, 3.1):
            grads.accumulate(0, torch.full((2, 2), gradient))
        grads.reduce()
        grads.wait_for_reduce()
        return _whole(grads, comm).tolist()

    nothing = [0.0] * FlatLayout.of(SHAPES, world_size).padded_numel
    assert run_threads(go, world_size) == [nothing] * world_size


@pytest.mark.parametrize("stage", STAGES)
def test_reductions_add_up_until_they_are_cleared(stage):
    def go(comm):
        grads = _grads(stage, comm)
        for _ in range(3):
            grads.accumulate(0, torch.ones(2, 2))
            grads.reduce()
        grads.wait_for_reduce()
        first = _whole(grads, comm).tolist()
        grads.clear({0, 1})
        assert grads.reduced is None
        assert not grads.pending
        grads.accumulate(0, torch.full((2, 2), 7.0))
        grads.clear({0, 1})  # before it was reduced
        assert not grads.pending
        grads.accumulate(1, torch.ones(3))
        grads.reduce()
        grads.wait_for_reduce()
        return first, _whole(grads, comm).tolist()

    for first, second in run_threads(go, 2):
        assert first == [3.0] * 4 + [0.0] * 4
        assert second == [0.0] * 4 + [1.0] * 3 + [0.0]


def test_gradients_arrive_in_any_dtype_and_sparse():
    grads = _grads(2, LocalCommunicator(), reduce_dtype=torch.float64, reduced_dtype=torch.float64)
    grads.accumulate(0, torch.ones(2, 2, dtype=torch.bfloat16))
    grads.accumulate(0, torch.eye(2).to_sparse())
    grads.reduce()
    grads.wait_for_reduce()
    assert grads.reduced.tolist() == [2, 1, 1, 2, 0, 0, 0]
    assert grads.reduced.dtype == torch.float64


@pytest.mark.redundant
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


BLOCK = [("matrix", (300, 300)), ("other", (256, 257)), *((f"small.{i}", (i + 5,)) for i in range(8))]


def _block(stage, comm, dtypes):
    param_dtype, reduce_dtype = dtypes
    layout, device = FlatLayout.of(BLOCK, comm.world_size), torch.device("cpu")
    settings = {"device": device, "reduced_dtype": torch.float32, "reduce_dtype": reduce_dtype}
    grads = Gradients("unit", layout, STAGES[stage], RankGroups.of(comm), **settings)

    def accumulate(seed, slots=range(10)):
        drawn = torch.Generator().manual_seed(seed)
        for slot in slots:
            grads.accumulate(slot, torch.randn(BLOCK[slot][1], generator=drawn).to(param_dtype))

    return grads, accumulate


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2]
)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_wait_for_each_other_have_the_same_bits(stage, world_size, dtypes, monkeypatch):
    """Also where some never come, some are cleared or replaced while others wait, and a second micro-batch follows."""

    def means(together):
        monkeypatch.setattr(small_grads, "LEAST_TOGETHER", 3 if together else 1000)

        def go(comm):
            grads, accumulate = _block(stage, comm, dtypes)
            found = []
            for slots in (range(10), (0, 3, 4), range(1, 9)):
                accumulate(comm.rank, slots)
                waits = together and (world_size == 1 or dtypes[1] is not torch.bfloat16)
                assert waits == bool(grads.small.num_bytes) or len(slots) == 10
                if len(slots) == 3:
                    grads.clear({4})
                if len(slots) != 8:  # the last ones still wait when they are reduced
                    accumulate(comm.rank + 7, slots[:2])
                grads.reduce()
                grads.wait_for_reduce()
                found.append(grads.reduced.clone())
                grads.clear(set(range(10)))
                assert not grads.small.num_bytes
            return found

        return run_threads(go, world_size)

    for one, other in zip(means(True), means(False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 2])
def test_further_gradients_wait_too_and_have_the_same_bits(stage, world_size, dtypes, monkeypatch):
    """Of micro-batches that a reduction is between, or none; one is cleared while it waits, one comes twice."""

    def sums(together):
        monkeypatch.setattr(small_grads, "LEAST_TOGETHER", 3 if together else 1000)

        def go(comm):
            grads, accumulate = _block(stage, comm, dtypes)
            accumulate(0, (2, 3))
            grads.clear(set(range(10)))
            assert not grads.small.num_bytes
            for seed, reduces in ((1, True), (2, False), (3, True), (4, True)):
                accumulate(10 * comm.rank + seed, (*range(9), 5))
                waits = together and world_size != 3  # by a third, which rounds, the second of slot 5 is added alone
                assert waits == bool(grads.small.num_bytes)
                if seed == 3:
                    grads.clear({8})
                if reduces:
                    grads.reduce()
            grads.wait_for_reduce()
            return grads

        return run_threads(go, world_size)

    for one, other in zip(sums(True), sums(False), strict=True):
        assert torch.equal(one.reduced, other.reduced)
        local, reduced, _ = one.buffers
        assert (world_size == 1) == (local is not None and storage_id(local) == storage_id(reduced))  # one buffer
        whole = one.layout.views(local) if world_size == 1 else [torch.ones(1)]
        assert all(view.any() for view in whole[:9])
        assert not any(view.any() for view in whole[9:])


def test_a_gradient_that_is_replaced_first_is_added_to_on_one_rank():
    grads = _grads(2, LocalCommunicator())
    put(grads, 0, torch.full((4,), 2.0))
    for _ in range(2):
        grads.accumulate(0, torch.ones(2, 2))
        grads.reduce()
    grads.wait_for_reduce()
    assert grads.reduced.tolist() == [4.0] * 4 + [0.0] * 3


def test_a_waiting_gradient_that_its_sender_changes_is_an_error():
    grads, accumulate = _block(2, NullCommunicator(2), (torch.float32, torch.float32))
    accumulate(1)
    shared = torch.ones(BLOCK[2][1])
    grads.accumulate(2, shared)
    shared.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"changed in place after .*small\.0, .*; let hooks .* return new tensors"):
        accumulate(2, range(3, 10))


def test_a_small_view_of_a_large_gradient_does_not_keep_it():
    grads, _ = _block(2, NullCommunicator(4), (torch.float32, torch.float32))
    grads.accumulate(2, torch.ones(300, 300)[0, :5])
    assert grads.small.num_bytes == 0


def test_a_hook_that_changes_what_a_parameter_shares_is_an_error():
    class Shares(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.added = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.zeros(2, 4))
            self.large = torch.nn.Parameter(torch.zeros(small_grads.SMALL_NUMEL + 1))  # beside which all else is small

        def forward(self, x):
            hidden = self.linear(x)
            hidden.register_hook(lambda grad: grad.mul_(2))
            return (hidden + self.added).square().sum() + self.large.sum()

    zero = Zero(Shares(), 1, comm=LocalCommunicator())
    zero.model(torch.ones(2, 4)).backward()  # autograd copies a first gradient that others have too
    with pytest.raises(RuntimeError, match="changed in place"):
        zero.model(torch.ones(2, 4)).backward()
