"""Tensors cut from shared memory: freed memory serves again, places lead to the same bytes, no room is no error."""

import gc

import pytest
import torch

from zeroshard.comm import SharedMemoryCommunicator
from zeroshard.comm.shm import arena, mapped, shm
from zeroshard.comm.shm.arena import Arena, MappedArena
from zeroshard.comm.shm.mapped import LOST, Segment


@pytest.fixture
def segments():
    """A segment as its owner and as another rank have it."""
    own = Segment.create(0, LOST + 1, 4096)
    other = Segment.attach(own.path, 0, LOST + 1)
    yield own, other
    own.close()
    other.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("numel", [1, 5, 4096, 100_003])
def test_another_rank_sees_the_same_memory(segments, dtype, numel):
    own, other = segments
    mine = Arena(own)
    first, tensor = mine.empty(7, torch.float32), mine.empty(numel, dtype)
    tensor.copy_(torch.arange(numel))
    part = tensor[numel // 2 :]
    place = mine.place_of(part)
    assert place is not None
    seen = MappedArena(other).view(place, part.numel(), dtype)
    assert seen.data_ptr() != part.data_ptr()
    assert torch.equal(seen, part)
    part.zero_()
    assert not seen.any()
    assert tensor.untyped_storage().nbytes() == numel * dtype.itemsize
    assert first.data_ptr() % 64 == tensor.data_ptr() % 64 == 0


def test_memory_that_is_free_again_serves_the_next_tensor_of_its_size(segments):
    mine = Arena(segments[0])
    tensor = mine.empty(1000, torch.float32)
    address, view = tensor.data_ptr(), tensor[3:]
    del tensor
    gc.collect()
    assert mine.empty(1000, torch.float32).data_ptr() != address, "a view still lives"
    del view
    gc.collect()
    again = mine.empty(500, torch.float64)
    assert again.data_ptr() == address
    assert mine.empty(1000, torch.float32).data_ptr() != address


def test_extents_follow_one_another(segments, monkeypatch):
    monkeypatch.setattr(arena, "_EXTENT_BYTES", 8192)
    own, other = segments
    mine, theirs = Arena(own), MappedArena(other)
    tensors = [mine.empty(numel, torch.int32).fill_(i) for i, numel in enumerate((1000, 1024, 5000, 1, 2000))]
    for i, tensor in enumerate(tensors):
        place = mine.place_of(tensor)
        assert place is not None
        assert torch.equal(theirs.view(place, tensor.numel(), torch.int32), torch.full_like(tensor, i))


def test_without_room_memory_is_ordinary(segments, monkeypatch):
    own, _ = segments
    mine = Arena(own)
    kept = mine.empty(10, torch.float32)

    def full(fd, start, num_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped, "_reserve", full)
    tensor = mine.empty(2000, torch.float32)
    assert tensor.shape == (2000,)
    assert mine.place_of(tensor) is None
    assert mine.place_of(kept) is not None


def _values(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def _all_ways(comm, numel, cut):
    """all_reduce, reduce_scatter, all_gather of tensors that lie in shared memory where ``cut(rank)``."""
    own = SharedMemoryCommunicator(comm.group)
    numel *= comm.world_size
    make = own.empty if cut(comm.rank) else lambda n, dtype: torch.empty(n, dtype=dtype)
    reduced, whole, gathered = (make(numel, torch.float32) for _ in range(3))
    size = numel // comm.world_size
    mine = slice(comm.rank * size, (comm.rank + 1) * size)
    for tensor in (reduced, whole, gathered):
        tensor.copy_(_values(comm.rank, numel))
    works = [own.all_reduce(reduced), own.reduce_scatter(whole[mine], whole), own.all_gather(gathered, gathered[mine])]
    for work in works:
        work.wait()
    offers = own._slots._num_offers
    own.close()
    return reduced.clone(), whole[mine].clone(), gathered.clone(), offers


def _expected(world_size, numel):
    """What ``_all_ways`` gives on each rank: sums in rank order."""
    total = _values(0, numel * world_size)
    for rank in range(1, world_size):
        total = total + _values(rank, numel * world_size)
    parts = [_values(rank, numel * world_size).chunk(world_size)[rank] for rank in range(world_size)]
    return [(total, total.chunk(world_size)[rank], torch.cat(parts)) for rank in range(world_size)]


@pytest.mark.redundant(but=["slots-1-3"])
@pytest.mark.pairwise
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 64 << 10, 100_003])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "slots"])
def test_sums_are_in_rank_order_wherever_tensors_lie(gloo_ranks, world_size, numel, direct):
    results = gloo_ranks(world_size).run(_all_ways, numel, _everywhere if direct else _nowhere)
    for rank, (ours, expected) in enumerate(zip(results, _expected(world_size, numel), strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(ours[:3], expected, strict=True)), rank
        assert ours[3] == (3 if numel * world_size * 4 >= shm.DIRECT_BYTES else 0), "a large tensor's place is offered"


def test_one_rank_without_a_place_sends_all_through_the_slots(gloo_ranks):
    mixed = gloo_ranks(3).run(_all_ways, 100_003, _all_but_one)
    for ours, expected in zip(mixed, _expected(3, 100_003), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[:3], expected, strict=True))


def _gathered_out_of_order(comm):
    """Gathers of shards, and into tensors, whose bytes in shared memory are not simply their elements."""
    own = SharedMemoryCommunicator(comm.group)
    numel = shm.DIRECT_BYTES // 4
    floats, numbers = own.empty(2 * numel, torch.float32), own.empty(2 * numel, torch.complex64)
    floats.copy_(_values(comm.rank, 2 * numel))
    numbers.copy_(torch.complex(_values(comm.rank, 2 * numel), _values(comm.rank + 7, 2 * numel)))
    wide = own.empty(2 * numel * comm.world_size, torch.float32)
    pairs = [
        (own.empty(numel * comm.world_size, torch.float32), floats[::2]),
        (wide[1::2], floats[:numel]),
        (own.empty(numel * comm.world_size, torch.complex64), numbers[:numel].conj()),
        (own.empty(numel * comm.world_size, torch.float32), numbers.conj().imag[:numel]),
    ]
    for whole, shard in pairs:
        own.all_gather(whole, shard).wait()
    results = [(whole.clone(), shard.clone().resolve_conj().resolve_neg()) for whole, shard in pairs]
    own.close()
    return results


def test_a_shard_whose_elements_do_not_lie_in_order_arrives_as_it_reads(gloo_ranks):
    ranks = gloo_ranks(2).run(_gathered_out_of_order)
    for case in range(len(ranks[0])):
        expected = torch.cat([results[case][1] for results in ranks])
        assert all(torch.equal(results[case][0], expected) for results in ranks), case


def _everywhere(rank):
    return True


def _nowhere(rank):
    return False


def _all_but_one(rank):
    return rank != 1
