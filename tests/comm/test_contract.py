"""What every communicator promises, checked against plain torch; see `zeroshard.comm.base` for the promises.

Every case is run with every communicator, and in every wrapper around ranks that are threads; with ``--soak`` in each
around each. What rank r sends is a pure function of r, so that each rank can compute what it must receive; in a null
world every rank holds what this one does.
"""

from functools import reduce

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import (
    BlockingCommunicator,
    Communicator,
    Link,
    LocalCommunicator,
    NullCommunicator,
    ObservedCommunicator,
    RingCommunicator,
    SharedMemoryCommunicator,
    ThrottledCommunicator,
    TorchCommunicator,
    all_to_all,
    reduce_scatter_consuming,
    run_threads,
    split,
)

OPS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
SIZES = [1, 7, 64, 1000]


def _inner(comm: Communicator) -> Communicator:
    wrappers = BlockingCommunicator | ObservedCommunicator | ThrottledCommunicator
    return comm.inner if isinstance(comm, wrappers) else comm


def _sent(comm: Communicator, rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What ``rank`` holds: small whole numbers, whose reductions are exact in every dtype."""
    if isinstance(_inner(comm), NullCommunicator):
        rank = 0
    generator = torch.Generator().manual_seed(100 * rank + seed)
    return torch.randint(0, 3, (numel,), generator=generator).to(dtype)


def _expected(comm: Communicator, op: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return reduce(OPS[op], [_sent(comm, rank, numel, dtype) for rank in range(comm.world_size)])


def _own(comm: Communicator, whole: torch.Tensor) -> torch.Tensor:
    return whole.view(comm.world_size, -1)[comm.rank]


def all_reduce_is_the_reduction(comm):
    for op in OPS:
        for dtype in DTYPES:
            for numel in SIZES:
                tensor = _sent(comm, comm.rank, numel, dtype)
                comm.all_reduce(tensor, op).wait()
                torch.testing.assert_close(tensor, _expected(comm, op, numel, dtype), rtol=0, atol=0)


def all_reduce_takes_any_shape(comm):
    matrix = _sent(comm, comm.rank, 6, torch.float32).view(2, 3)
    comm.all_reduce(matrix).wait()
    assert torch.equal(matrix.view(-1), _expected(comm, "sum", 6, torch.float32))
    scalar = _sent(comm, comm.rank, 1, torch.float32).view(())
    comm.all_reduce(scalar).wait()
    assert torch.equal(scalar.view(1), _expected(comm, "sum", 1, torch.float32))


def reduce_scatter_is_a_slice_of_the_reduction(comm):
    for op in OPS:
        for dtype in DTYPES:
            for numel in SIZES:
                whole = _sent(comm, comm.rank, comm.world_size * numel, dtype)
                shard = torch.empty(numel, dtype=dtype)
                comm.reduce_scatter(shard, whole, op).wait()
                expected = _own(comm, _expected(comm, op, comm.world_size * numel, dtype))
                torch.testing.assert_close(shard, expected, rtol=0, atol=0)


def reduce_scatter_works_in_place(comm):
    whole = _sent(comm, comm.rank, comm.world_size * 5, torch.float32)
    own = _own(comm, whole)
    comm.reduce_scatter(own, whole).wait()
    assert torch.equal(own, _own(comm, _expected(comm, "sum", comm.world_size * 5, torch.float32)))


def reduce_scatter_keeps_its_input(comm):
    for numel in (1, 3, 1 << 17):  # of a shard; the last is no small message
        whole = _sent(comm, comm.rank, comm.world_size * numel, torch.float32)
        given, shard = whole.clone(), torch.empty(numel)
        comm.reduce_scatter(shard, whole).wait()
        assert torch.equal(whole, given)
        consumed = torch.empty(numel)
        reduce_scatter_consuming(comm, consumed, whole).wait()
        assert torch.equal(consumed, shard)


def reduce_scatter_has_the_bits_of_all_reduce(comm):
    assert comm.uniform_order
    rank = 0 if isinstance(_inner(comm), NullCommunicator) else comm.rank
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for numel in (*SIZES, 100_000):  # gloo cuts the last
            mine = torch.randn(comm.world_size * numel, generator=generator, dtype=torch.float64).to(dtype) * 10**rank
            reduced, shard = mine.clone(), torch.empty(numel, dtype=dtype)
            comm.all_reduce(reduced).wait()
            comm.reduce_scatter(shard, mine).wait()
            assert torch.equal(shard, _own(comm, reduced))


def a_reduction_has_the_same_bits_on_every_rank_and_twice(comm):
    generator = torch.Generator().manual_seed(0 if isinstance(_inner(comm), NullCommunicator) else comm.rank)
    mine = torch.randn(1001, generator=generator)
    first, second = mine.clone(), mine.clone()
    comm.all_reduce(first).wait()
    comm.all_reduce(second).wait()
    assert torch.equal(first, second)
    everyone = torch.empty(comm.world_size * first.numel())
    comm.all_gather(everyone, first).wait()
    assert all(torch.equal(row, first) for row in everyone.view(comm.world_size, -1))


def all_gather_is_everybodys_shard_in_order(comm):
    for dtype in [*DTYPES, torch.bool, torch.float16]:
        for numel in SIZES:
            whole = torch.zeros(comm.world_size * numel, dtype=dtype)
            comm.all_gather(whole, _sent(comm, comm.rank, numel, dtype)).wait()
            expected = torch.cat([_sent(comm, rank, numel, dtype) for rank in range(comm.world_size)])
            assert torch.equal(whole, expected)


def all_gather_works_in_place(comm):
    whole = torch.full((comm.world_size * 5,), -1.0)
    own = _own(comm, whole)
    own.copy_(_sent(comm, comm.rank, 5, torch.float32))
    comm.all_gather(whole, own).wait()
    assert torch.equal(whole, torch.cat([_sent(comm, rank, 5, torch.float32) for rank in range(comm.world_size)]))


def all_to_all_is_everybodys_part_for_this_rank(comm):
    size = comm.world_size
    for dtype in [*DTYPES, torch.bool]:
        for numel in [*SIZES, 300_000 // dtype.itemsize] if dtype is torch.uint8 else SIZES:
            parts, whole = _sent(comm, comm.rank, size * numel, dtype), torch.zeros(size * numel, dtype=dtype)
            before = parts.clone()
            work = all_to_all(comm, whole, parts)
            other = torch.empty_like(whole)
            all_to_all(comm, other, parts).wait()
            work.wait()
            expected = torch.cat([_own(comm, _sent(comm, rank, size * numel, dtype)) for rank in range(size)])
            assert torch.equal(whole, expected)
            assert torch.equal(other, expected)
            assert torch.equal(parts, before)


def broadcast_sends_from_any_rank(comm):
    for src in range(comm.world_size):
        for dtype in [*DTYPES, torch.bool]:
            tensor = _sent(comm, comm.rank, 12, dtype).view(3, 4)
            comm.broadcast(tensor, src=src).wait()
            assert torch.equal(tensor.view(-1), _sent(comm, src, 12, dtype))
    scalar = _sent(comm, comm.rank, 1, torch.int64).view(())
    comm.broadcast(scalar, src=0).wait()
    assert torch.equal(scalar.view(1), _sent(comm, 0, 1, torch.int64))


def several_operations_are_in_flight(comm):
    numel = comm.world_size * 33
    reduced = [_sent(comm, comm.rank, numel, torch.float32, seed) for seed in range(4)]
    scattered = [torch.empty(33) for _ in range(4)]
    gathered = [torch.empty(numel) for _ in range(4)]
    sources = [t.clone() for t in reduced]
    shards = [_sent(comm, comm.rank, 33, torch.float32, seed) for seed in range(4)]
    works = []
    for i in range(4):
        works.append(comm.all_reduce(reduced[i]))
        works.append(comm.reduce_scatter(scattered[i], sources[i]))
        works.append(comm.all_gather(gathered[i], shards[i]))
    for work in reversed(works):
        work.wait()
        work.wait()  # a second time is allowed and does nothing
    for i in range(4):
        total = sum(_sent(comm, rank, numel, torch.float32, i) for rank in range(comm.world_size))
        assert torch.equal(reduced[i], total)
        assert torch.equal(scattered[i], _own(comm, total))
        everyone = torch.cat([_sent(comm, rank, 33, torch.float32, i) for rank in range(comm.world_size)])
        assert torch.equal(gathered[i], everyone)


def tensors_of_any_strides_are_taken(comm):
    size, rank = comm.world_size, 0 if isinstance(_inner(comm), NullCommunicator) else comm.rank

    def strided(rows: int, fill: float) -> torch.Tensor:
        return torch.full((3, 2 * rows), fill).t()[::2]  # [rows, 3], in no order and with gaps

    own = strided(2, 0.0).copy_(torch.arange(6.0).view(2, 3) + 10 * rank)
    distance = 0 if isinstance(_inner(comm), NullCommunicator) else 10
    theirs = [torch.arange(6.0).view(2, 3) + distance * r for r in range(size)]
    whole = strided(2 * size, -1.0)
    comm.all_gather(whole, own).wait()
    assert torch.equal(whole, torch.cat(theirs))
    part = strided(2, -1.0)
    comm.reduce_scatter(part, whole).wait()
    assert torch.equal(part, size * theirs[comm.rank])
    part, halves = strided(2, 1.0), torch.zeros(8)
    comm.all_reduce(part).wait()
    assert torch.equal(part, torch.full((2, 3), float(size)))
    comm.all_reduce(halves[::2].add_(1.0)).wait()
    assert torch.equal(halves, torch.tensor([float(size), 0.0]).repeat(4))
    comm.broadcast(own, src=0).wait()
    assert torch.equal(own, theirs[0])
    parts, all_parts = strided(2 * size, float(rank)), strided(2 * size, -1.0)
    all_to_all(comm, all_parts, parts).wait()
    assert all_parts[::2, 0].tolist() == [theirs[r][0, 0].item() / 10 for r in range(size)]


def inputs_that_overlap_the_output_are_read_before_it_is_written(comm):
    for n in (4, 1 << 17):  # of a shard; the second is no small message
        size = comm.world_size * n
        everyone = torch.cat([_sent(comm, rank, n, torch.float32) for rank in range(comm.world_size)])
        for start in (0, 3):  # a rank's own slice only on rank 0, and on no rank
            gathered = torch.zeros(size + 3)
            own = gathered[start : start + n].copy_(_sent(comm, comm.rank, n, torch.float32))
            comm.all_gather(gathered[:size], own).wait()
            assert torch.equal(gathered[:size], everyone)
            whole = torch.zeros(size + 3)
            whole[:size] = _sent(comm, comm.rank, size, torch.float32)
            shard = whole[start : start + n]
            comm.reduce_scatter(shard, whole[:size]).wait()
            assert torch.equal(shard, _own(comm, _expected(comm, "sum", size, torch.float32)))


def empty_tensors_are_nothing(comm):
    comm.all_reduce(torch.empty(0)).wait()
    comm.reduce_scatter(torch.empty(0), torch.empty(0)).wait()
    comm.all_gather(torch.empty(0), torch.empty(0)).wait()
    all_to_all(comm, torch.empty(0), torch.empty(0)).wait()
    comm.broadcast(torch.empty(0, 3), src=0).wait()
    comm.barrier()


def arguments_that_do_not_fit_are_refused(comm):
    size = comm.world_size
    with pytest.raises(ValueError, match="op: 'mean' is not a reduction"):
        comm.all_reduce(torch.zeros(2), "mean")
    with pytest.raises(ValueError, match="op: 'mean' is not a reduction"):
        comm.reduce_scatter(torch.zeros(2), torch.zeros(2 * size), "mean")
    with pytest.raises(ValueError, match=f"numel: {2 * size + 1} elements are not {size} shards of 2"):
        comm.reduce_scatter(torch.zeros(2), torch.zeros(2 * size + 1))
    with pytest.raises(ValueError, match=f"are not {size} shards of 3"):
        comm.all_gather(torch.zeros(2 * size), torch.zeros(3))
    with pytest.raises(ValueError, match=r"dtype: torch.float32 and torch.float64 differ"):
        comm.all_gather(torch.zeros(2 * size), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"numel: {2 * size} elements to {3 * size} are not {size} parts each"):
        all_to_all(comm, torch.zeros(3 * size), torch.zeros(2 * size))
    with pytest.raises(ValueError, match=r"dtype: torch.float32 and torch.float64 differ"):
        all_to_all(comm, torch.zeros(2 * size), torch.zeros(2 * size, dtype=torch.float64))
    with pytest.raises(ValueError, match="output: it shares memory with the input; an all-to-all needs"):
        all_to_all(comm, same := torch.zeros(2 * size), same)
    with pytest.raises(ValueError, match="output: it shares memory with the input; an all-to-all needs"):
        all_to_all(comm, (same := torch.zeros(2 * size + 1))[1:], same[:-1])
    for src in (-1, size):
        with pytest.raises(ValueError, match=f"src: rank {src} is outside a world of {size}"):
            comm.broadcast(torch.zeros(2), src=src)


def parts_talk_among_themselves(comm):
    size, rank = comm.world_size, comm.rank
    for groups in ([[r for r in range(size) if r % 2 == odd] for odd in (0, 1)], [[r] for r in range(size)]):
        groups = [ranks for ranks in groups if ranks]
        ranks = next(ranks for ranks in groups if rank in ranks)
        part = split(comm, groups)
        assert (part.rank, part.world_size) == (ranks.index(rank), len(ranks))
        cases = (all_reduce_is_the_reduction, all_gather_works_in_place, several_operations_are_in_flight)
        for case in (*cases, all_to_all_is_everybodys_part_for_this_rank):
            case(part)
        # What a part sends is its own, whatever else is under way.
        everyone, few = torch.ones(9), torch.ones(9)
        works = [comm.all_reduce(everyone), part.all_reduce(few)]
        for work in works:
            work.wait()
        assert (everyone[0], few[0]) == (size, len(ranks))
        part.barrier()
        if len(ranks) > 1:
            pair = split(part, [list(range(len(ranks) - 1)), [len(ranks) - 1]])
            assert pair.world_size == (1 if part.rank == len(ranks) - 1 else len(ranks) - 1)
            broadcast_sends_from_any_rank(pair)
    assert split(comm, [range(size)]) is comm
    alone = split(comm, [range(size)], anew=True)
    assert alone is not comm
    everyone, few = torch.ones(9), torch.ones(9)
    works = [alone.all_reduce(few), comm.all_reduce(everyone)]  # each in its own order
    for work in reversed(works):
        work.wait()
    all_to_all_is_everybodys_part_for_this_rank(alone)


def groups_that_do_not_share_out_the_world_are_refused(comm):
    size = comm.world_size
    for groups in ([], [[0], [0]], [[*range(size), size]], [list(range(1, size + 1))], [[0], []]):
        with pytest.raises(ValueError, match=f"do not share out a world of {size}|are not lists of ascending ranks"):
            split(comm, groups)
    if size > 1:
        with pytest.raises(ValueError, match="are not lists of ascending ranks"):
            split(comm, [list(reversed(range(size)))])


def it_is_a_communicator(comm):
    assert isinstance(comm, Communicator)
    assert 0 <= comm.rank < comm.world_size
    assert comm.control_device == torch.device("cpu")


CASES = {
    case.__name__: case
    for case in (
        it_is_a_communicator,
        all_reduce_is_the_reduction,
        all_reduce_takes_any_shape,
        reduce_scatter_is_a_slice_of_the_reduction,
        reduce_scatter_works_in_place,
        reduce_scatter_keeps_its_input,
        reduce_scatter_has_the_bits_of_all_reduce,
        a_reduction_has_the_same_bits_on_every_rank_and_twice,
        all_gather_is_everybodys_shard_in_order,
        all_gather_works_in_place,
        all_to_all_is_everybodys_part_for_this_rank,
        broadcast_sends_from_any_rank,
        several_operations_are_in_flight,
        tensors_of_any_strides_are_taken,
        inputs_that_overlap_the_output_are_read_before_it_is_written,
        empty_tensors_are_nothing,
        arguments_that_do_not_fit_are_refused,
        parts_talk_among_themselves,
        groups_that_do_not_share_out_the_world_are_refused,
    )
}


def _throttled(comm):
    """Two ranks a node, over links that are slower than the communicator and too fast to wait for."""
    return ThrottledCommunicator(comm, Link(20e-6, 1e9), node_size=2)


WRAPPERS = {
    "bare": lambda comm: comm,
    "blocking": BlockingCommunicator,
    "observed": ObservedCommunicator,
    "throttled": _throttled,
}


def _on_rank(comm, case, wrapper):
    CASES[case](WRAPPERS[wrapper](comm))


def _on_own_rank(comm, case, wrapper, kind):
    """Over the same processes, with collectives of our own."""
    own = {"ring": RingCommunicator, "shm": SharedMemoryCommunicator}[kind](comm.group)
    CASES[case](WRAPPERS[wrapper](own))
    own.close()


def _on_rank_of_group(comm, case, wrapper):
    """Worlds of 4, cut into ranks 0 and 2, and ranks 1 and 3, in the other order."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    try:
        CASES[case](WRAPPERS[wrapper](TorchCommunicator(groups[comm.rank % 2])))
    finally:
        comm.barrier()
        for group in groups:
            if dist.get_rank(group) >= 0:
                dist.destroy_process_group(group)


def _soaking(values):
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


# What a wrapper does it does to ranks that are threads; around the others it is tried with ``--soak``.
bare = pytest.mark.parametrize("wrapper", ["bare", *_soaking(name for name in WRAPPERS if name != "bare")])


@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES)
class TestEachCommunicator:
    @bare
    def test_local(self, case, wrapper):
        """`_on_rank` asserts it."""
        _on_rank(LocalCommunicator(), case, wrapper)

    @pytest.mark.pairwise("world_size", "wrapper")
    @pytest.mark.parametrize("wrapper", WRAPPERS)
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    def test_threads(self, case, wrapper, world_size):
        """`_on_rank` asserts it."""
        run_threads(lambda comm: _on_rank(comm, case, wrapper), world_size)

    @bare
    @pytest.mark.parametrize(
        ("world_size", "rank"), [(3, 1), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, 0), (8, 7)))]
    )
    def test_null(self, case, wrapper, world_size, rank):
        """`_on_rank` asserts it."""
        _on_rank(NullCommunicator(world_size, rank), case, wrapper)

    @bare
    @pytest.mark.pairwise("case")
    @pytest.mark.parametrize("world_size", [2, 3, *_soaking([1, 4])])
    def test_gloo(self, case, wrapper, world_size, gloo_ranks):
        """`_on_rank` asserts it."""
        gloo_ranks(world_size).run(_on_rank, case, wrapper)

    @bare
    @pytest.mark.parametrize("world_size", [3, 4, *_soaking([1, 2])])
    @pytest.mark.parametrize("kind", ["ring", "shm"])
    def test_ours(self, case, wrapper, kind, world_size, gloo_ranks):
        """`_on_own_rank` asserts it."""
        gloo_ranks(world_size).run(_on_own_rank, case, wrapper, kind)

    @bare
    def test_gloo_groups(self, case, wrapper, gloo_ranks):
        """`_on_rank_of_group` asserts it."""
        gloo_ranks(4).run(_on_rank_of_group, case, wrapper)
