"""Memory for copies on the host: packed without waste where torch would round it up, and kept from save to save."""

import itertools

import pytest
import torch

from zeroshard.checkpoint import host_copies
from zeroshard.checkpoint.host_copies import ALIGNMENT_BYTES, HostMemory, packed

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize("block_bytes", [None, 1024])
def test_packed_tensors_lie_in_their_blocks_aligned_and_apart(block_bytes):
    sizes = [700, 0, 64, 5000, 300, 1, 65, 400, 1024]
    blocks, places = packed(sizes, block_bytes)
    spans = sorted((block, start, start + size) for (block, start), size in zip(places, sizes, strict=True) if size)
    assert all(stop <= blocks[block] and start % ALIGNMENT_BYTES == 0 for block, start, stop in spans)
    for (block, _, stop), (next_block, start, _) in itertools.pairwise(spans):
        assert next_block > block or start >= stop


def test_page_locked_blocks_are_powers_of_two_and_nearly_full():
    """What a rank of 8 has of an 8 B model: weights and two moments of 32 blocks, and of the embedding and the head."""
    sizes = [size for _ in range(3) for size in [*[27 * MIB] * 32, *[64 * MIB] * 32, 263 * MIB, 263 * MIB, 2048]]
    assert sum(sizes) > 10 * GIB
    blocks, _ = packed(sizes, GIB)
    assert all(block == 1 << (block.bit_length() - 1) and block <= GIB for block in blocks)
    assert sum(blocks) < 1.06 * sum(sizes)


def test_memory_on_a_gpu_has_page_locked_blocks(monkeypatch):
    made, empty = [], torch.empty
    monkeypatch.setattr(host_copies, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def taken(*args, **options):
        if "pin_memory" in options:
            made.append((args[0], options.pop("pin_memory")))
        return empty(*args, **options)

    monkeypatch.setattr(host_copies.torch, "empty", taken)
    memory = HostMemory()
    tensors = [torch.zeros(200), torch.zeros(100), torch.zeros(600)]
    memory.places(tensors)
    memory.places(tensors)
    assert made == [(4096, True)]
