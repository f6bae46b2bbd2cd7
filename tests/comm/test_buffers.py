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


def _kept(comm):
    ring, shm = RingCommunicator(), SharedMemoryCommunicator()
    before = buffer_bytes(ring)
    ring.all_reduce(torch.ones(10_000)).wait()
    found = before, buffer_bytes(ObservedCommunicator(ring)), buffer_bytes(shm), buffer_bytes(split(shm, [[0], [1]]))
    ring.close()
    shm.close()
    return found


def test_a_ring_keeps_where_two_chunks_land_and_shared_memory_its_slots(gloo_ranks):
    assert gloo_ranks(2).run(_kept) == [(0, 2 * MIN_CHUNK_BYTES, NUM_SLOTS * SLOT_BYTES, 0)] * 2
