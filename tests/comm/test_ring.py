"""The ring sends no byte too many, adds in the order that it says, holds two chunks, and names a peer that is gone."""

import threading
from functools import reduce

import pytest
import torch

from zeroshard.comm import PeerError, RingCommunicator, reduce_scatter_consuming, run_threads, thread_transports
from zeroshard.comm.ring import ring, small


class Counting:
    """A transport that counts what leaves, and to whom."""

    def __init__(self, inner):
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size
        self.sent_bytes, self.receivers, self.buffers, self.on_their_way = 0, set(), [], []

    def send(self, message, to):
        self.sent_bytes += message.nbytes
        self.receivers.add(to)
        return Leaving(self.inner.send(message, to), self.on_their_way)

    def recv(self, buffer, source):
        self.buffers.append(buffer)
        return self.inner.recv(buffer, source)

    def close(self):
        self.inner.close()


class Leaving:
    """A message that is on its way until its sender has waited for it."""

    def __init__(self, work, on_their_way):
        self.work, self.on_their_way = work, on_their_way
        on_their_way.append(self)

    def wait(self):
        self.work.wait()
        self.on_their_way.remove(self)


def on_rings(world_size, fn):
    """``fn(ring)`` on thread ranks, over counting transports."""
    transports = [Counting(inner) for inner in thread_transports(world_size, timeout_s=120)]

    def on_rank(comm):
        made = RingCommunicator(transport=transports[comm.rank])
        try:
            return fn(made)
        finally:
            made.close()

    return run_threads(on_rank, world_size)


def sent_bytes(comm, work):
    before = comm.transport.sent_bytes
    work().wait()
    return comm.transport.sent_bytes - before


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_bytes_sent_are_the_least_possible(world_size, dtype):
    numel = 12 * 50_000

    def on_rank(comm):
        whole, shard = torch.zeros(numel, dtype=dtype), torch.zeros(numel // world_size, dtype=dtype)
        sent = [
            sent_bytes(comm, lambda: comm.all_reduce(whole)),
            sent_bytes(comm, lambda: comm.reduce_scatter(shard, whole)),
            sent_bytes(comm, lambda: comm.all_gather(whole, shard)),
            sent_bytes(comm, lambda: comm.broadcast(whole, 1)),
        ]
        return sent, comm.transport.receivers

    tensor_bytes = numel * dtype.itemsize
    part = (world_size - 1) * tensor_bytes // world_size
    for rank, (sent, receivers) in enumerate(on_rings(world_size, on_rank)):
        assert sent == [2 * part, part, part, 0 if rank == 0 else tensor_bytes]  # rank 0 ends the chain from 1
        assert receivers == {(rank + 1) % world_size}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 2, 3, 5, 1001, 700_001])
def test_a_size_that_the_world_does_not_divide_is_reduced_whole(world_size, numel):
    def on_rank(comm):
        tensor = torch.arange(numel, dtype=torch.float64) + comm.rank
        sent = sent_bytes(comm, lambda: comm.all_reduce(tensor))
        return tensor, sent

    expected = world_size * torch.arange(numel, dtype=torch.float64) + sum(range(world_size))
    padded_bytes = -(-numel // world_size) * world_size * 8
    for tensor, sent in on_rings(world_size, on_rank):
        assert torch.equal(tensor, expected)
        ring_bytes = 2 * (world_size - 1) * padded_bytes // world_size
        assert sent <= max(ring_bytes, (world_size - 1) * numel * 8 if small.is_small(numel * 8, world_size) else 0)


@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
def test_a_shard_is_reduced_from_its_owners_right_neighbour_on(op):
    world_size, numel = 4, 8
    torch_op = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}[op]
    generator = torch.Generator().manual_seed(0)
    held = [torch.randn(numel, generator=generator) * 10**rank for rank in range(world_size)]

    def on_rank(comm):
        tensor = held[comm.rank].clone()
        comm.all_reduce(tensor, op).wait()
        return tensor

    expected = torch.empty(world_size, numel // world_size)
    for shard in range(world_size):
        order = [(shard + 1 + i) % world_size for i in range(world_size)]
        expected[shard] = reduce(torch_op, [held[rank].view(world_size, -1)[shard] for rank in order])
    assert all(torch.equal(tensor, expected.view(-1)) for tensor in on_rings(world_size, on_rank))


@pytest.mark.redundant(but=["sum-4"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_small_messages_have_the_bits_of_a_ring_in_as_many_rounds_as_doubling_takes(world_size, op, monkeypatch):
    shard_numel, numels = 3, (1, 2, 5, 3 * world_size)

    def on_rank(comm):
        found, num_sent = [], []
        for numel in numels:
            generator = torch.Generator().manual_seed(comm.rank * 100 + numel)
            whole = torch.randn(numel, generator=generator) * 10**comm.rank
            shard = torch.zeros(shard_numel)
            todo = {
                "all_reduce": lambda whole=whole: comm.all_reduce(whole, op),
                "broadcast": lambda whole=whole: comm.broadcast(whole, world_size - 1),
            }
            if numel == shard_numel * world_size:
                todo["reduce_scatter"] = lambda whole=whole, shard=shard: comm.reduce_scatter(shard, whole.clone(), op)
                todo["all_gather"] = lambda whole=whole, shard=shard: comm.all_gather(whole, shard)
            for name, start in todo.items():
                before = len(comm.transport.buffers)
                start().wait()
                num_sent.append((name, len(comm.transport.buffers) - before))
                found += [whole.clone(), shard.clone()] if len(todo) == 4 and name != "broadcast" else [whole.clone()]
        return found, num_sent

    quick = on_rings(world_size, on_rank)
    monkeypatch.setattr(small, "MOST_BYTES", 0)
    around = on_rings(world_size, on_rank)
    for (ours, num_sent), (theirs, _) in zip(quick, around, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        num_rounds = (world_size - 1).bit_length()
        assert all(num <= (1 if name == "broadcast" else num_rounds) for name, num in num_sent)


@pytest.mark.redundant
def test_no_more_than_two_chunks_are_held_beside_the_callers_tensors():
    numel = 6 * ring.MAX_CHUNK_BYTES

    def on_rank(comm):
        whole, shard = torch.zeros(numel), torch.zeros(numel // 3)
        comm.all_reduce(whole).wait()
        reduce_scatter_consuming(comm, shard, whole).wait()
        comm.all_gather(whole, shard).wait()
        ours = {whole.untyped_storage().data_ptr(), shard.untyped_storage().data_ptr()}
        storages = [buffer.untyped_storage() for buffer in comm.transport.buffers]
        return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in ours}

    for beside in on_rings(3, on_rank):
        assert sum(beside.values()) == 2 * ring.MAX_CHUNK_BYTES


@pytest.mark.parametrize("most_bytes", [0, small.MOST_BYTES])
def test_nothing_is_on_its_way_when_an_operation_is_done(most_bytes, monkeypatch):
    """The caller writes into its tensors then, which are sent from where they lie."""
    monkeypatch.setattr(small, "MOST_BYTES", most_bytes)

    def on_rank(comm):
        whole, shard = torch.zeros(1200), torch.zeros(400)
        left = []
        for issue in (
            lambda: comm.all_reduce(whole),
            lambda: comm.reduce_scatter(shard, whole),
            lambda: comm.all_gather(whole, shard),
            lambda: comm.broadcast(whole, 1),
        ):
            issue().wait()
            left.append(len(comm.transport.on_their_way))
        comm.barrier()
        return [*left, len(comm.transport.on_their_way)]

    assert on_rings(3, on_rank) == [[0] * 5] * 3


@pytest.mark.parametrize(("world_size", "distances"), [(2, [1]), (3, [1, 2]), (4, [1, 2]), (5, [1, 2, 4])])
def test_in_a_barrier_every_rank_hears_of_every_other_in_rounds_of_twice_the_distance(world_size, distances):
    def on_rank(comm):
        comm.barrier()
        return comm.transport.receivers, len(comm.transport.buffers)

    right_of = [{(rank + distance) % world_size for distance in distances} for rank in range(world_size)]
    assert on_rings(world_size, on_rank) == [(receivers, len(distances)) for receivers in right_of]


class Eager:
    """Of a world of two: messages land as soon as there is a place for them, and whoever waits for the first one is
    kept until the second has landed too."""

    world_size = 2

    def __init__(self, rank, ends, changed):
        self.rank, self.ends, self.changed = rank, ends, changed
        self.places, self.messages, self.num_landed = [], [], 0

    def _land(self):
        while self.num_landed < min(len(self.places), len(self.messages)):
            self.places[self.num_landed].copy_(self.messages[self.num_landed])
            self.num_landed += 1
        self.changed.notify_all()

    def send(self, message, to):
        with self.changed:
            self.ends[to].messages.append(message)
            self.ends[to]._land()
            num_sent = len(self.ends[to].messages)
        return Until(self.changed, lambda: self.ends[to].num_landed >= num_sent)

    def recv(self, buffer, source):
        with self.changed:
            self.places.append(buffer)
            self._land()
        wanted = max(len(self.places), 2)
        return Until(self.changed, lambda: self.num_landed >= wanted)

    def close(self):
        pass


class Until:
    def __init__(self, changed, done):
        self.changed, self.done = changed, done

    def wait(self):
        with self.changed:
            assert self.changed.wait_for(self.done, 30)


def test_two_chunks_that_land_before_either_is_added_lie_apart(monkeypatch):
    monkeypatch.setattr(ring, "MIN_CHUNK_BYTES", 64)
    monkeypatch.setattr(ring, "MAX_CHUNK_BYTES", 64)
    monkeypatch.setattr(small, "MOST_BYTES", 0)
    ends, changed = [], threading.Condition()
    ends += [Eager(rank, ends, changed) for rank in range(2)]

    def on_rank(comm):
        made = RingCommunicator(transport=ends[comm.rank])
        shard = torch.empty(32)  # two chunks
        made.reduce_scatter(shard, torch.arange(64.0) * 10**comm.rank).wait()
        made.close()
        return shard

    shards = run_threads(on_rank, 2)
    assert torch.equal(torch.cat(shards), 11 * torch.arange(64.0))


def test_tensors_of_another_device_are_refused():
    def on_rank(comm):
        with pytest.raises(ValueError, match="device: RingCommunicator moves CPU tensors, not meta's"):
            comm.all_reduce(torch.empty(3, device="meta"))

    on_rings(2, on_rank)


def test_an_error_on_the_way_is_raised_in_wait():
    comm = RingCommunicator(transport=thread_transports(2, timeout_s=0.05)[0])
    work = comm.all_reduce(torch.zeros(4))
    with pytest.raises(PeerError, match="rank 1 is gone or did not answer"):
        work.wait()
    with pytest.raises(PeerError, match="rank 1 is gone or did not answer"):
        comm.barrier()
    comm.close()


LOSS = """
comm = OURS[kind]()
tensor = torch.ones(1_000_003)
comm.all_reduce(tensor).wait()
if rank == 2:
    os._exit(9)
works = [comm.all_reduce(tensor) for _ in range(3)]
try:
    for work in works:
        work.wait()
except PeerError as error:
    say(error)
sys.exit(4)
"""


@pytest.mark.redundant(but=["shm"])
@pytest.mark.parametrize("kind", ["ring", "shm"])
def test_a_rank_that_dies_is_named_by_every_other(rank_scripts, kind):
    codes, said = rank_scripts(LOSS, 4, kind=kind)
    assert codes == [4, 4, 9, 4]
    assert ["rank 2 is gone" in said[rank] for rank in (0, 1, 3)] == [True] * 3, said


END = """
comm = OURS[kind]()
tensor = torch.ones(100_000)
work = comm.all_reduce(tensor)
if how == "waits":
    work.wait()
if how != "leaves":
    comm.close()
del comm, work
if how != "leaves":
    shutdown()
say(tensor[0].item())
"""


@pytest.mark.redundant
@pytest.mark.parametrize(("kind", "how"), [("ring", "waits"), ("shm", "closes"), ("ring", "leaves"), ("shm", "leaves")])
def test_a_program_ends_cleanly_and_one_that_closes_nothing_too(rank_scripts, kind, how):
    codes, said = rank_scripts(END, 3, kind=kind, how=how)
    assert codes == [0] * 3
    assert how == "leaves" or said == ["3.0"] * 3
