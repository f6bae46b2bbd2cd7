"""Memory for copies on the host: aligned, of the exact size, page-locked for a GPU, and kept from save to save."""

import itertools

import pytest
import torch

from zeroshard.checkpoint.host_copies import ALIGNMENT_BYTES, HostMemory
from zeroshard.host import host_memory, slab
from zeroshard.host.errors import UserError

TENSORS = [torch.zeros(size, dtype=torch.uint8) for size in (700, 0, 64, 5000, 300, 1, 65)]
ROOM = sum(-(-tensor.nbytes // 64) * 64 for tensor in TENSORS)


def test_copies_lie_aligned_and_apart_and_later_saves_have_the_same_memory():
    memory = HostMemory()
    places = memory.places(TENSORS)
    spans = sorted((place.data_ptr(), place.data_ptr() + place.nbytes) for place in places if place.numel())
    assert all(start % ALIGNMENT_BYTES == 0 for start, _ in spans)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert memory.places(TENSORS[3:])[0].data_ptr() == places[0].data_ptr()


def test_memory_for_a_gpu_is_locked_once_and_its_lack_is_one_line(monkeypatch):
    made, true_slab = [], slab.Slab

    def on_cpu(num_bytes, *, device, pinned):
        made.append((num_bytes, pinned))
        return true_slab(num_bytes, device=torch.device("cpu"), pinned=pinned)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(slab, "Slab", on_cpu)
    memory = HostMemory()
    memory.places(TENSORS)
    memory.places(TENSORS[2:])
    assert made == [(ROOM, True)]
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 10)
    line = (
        r"^checkpoint_async: a copy of the state: a rank needs .* host memory: .*; save while .* --no-checkpoint-async"
    )
    with pytest.raises(UserError, match=line):
        HostMemory().places(TENSORS)
