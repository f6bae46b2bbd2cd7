"""What communicators keep for themselves, beside the tensors that they are given."""

import torch

from zeroshard.comm import (
    NullCommunicator,
    ObservedCommunicator,
    RingCommunicator,
    SharedMemoryCommunicator,
    buffer_bytes,
    split,
)
from zeroshard.comm.ring.ring import MIN_CHUNK_BYTES
from zeroshard.comm.shm.slots import NUM_SLOTS, SLOT_BYTES


def test_who_keeps_nothing_has_none():
    assert buffer_bytes(NullCommunicator(4)) == buffer_bytes(ObservedCommunicator(NullCommunicator(4))) == 0


def _ring(comm):
    ring = RingCommunicator()
    before = buffer_bytes(ring)
    ring.all_reduce(torch.ones(10_000)).wait()
    after = buffer_bytes(ObservedCommunicator(ring))
    ring.close()
    return before, after


def test_a_ring_keeps_where_two_chunks_land(gloo_ranks):
    assert gloo_ranks(2).run(_ring) == [(0, 2 * MIN_CHUNK_BYTES)] * 2


def _shm(comm):
    shm = SharedMemoryCommunicator()
    whole = buffer_bytes(shm)
    part = split(shm, [[0], [1]])
    found = whole, buffer_bytes(part), buffer_bytes(shm)
    shm.close()
    return found


def test_shared_memory_keeps_its_slots(gloo_ranks):
    own = NUM_SLOTS * SLOT_BYTES
    assert gloo_ranks(2).run(_shm) == [(own, 0, own)] * 2
