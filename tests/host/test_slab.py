"""A slab takes exactly its bytes, is locked only for a GPU, and says in one line what is missing."""

from __future__ import annotations

import gc
import re
import resource
from contextlib import nullcontext

import pytest
import torch

from zeroshard.host import host_memory
from zeroshard.host.errors import UserError
from zeroshard.host.finalizers import settle
from zeroshard.host.slab import Slab, room

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Cudart:
    """CUDA's runtime, as far as it locks pages; fails with ``status``."""

    def __init__(self):
        self.status, self.locked, self.waited = 0, {}, []

    def cudaHostRegister(self, address, num_bytes, flags):
        if not self.status:
            self.locked[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, status):
        return {2: "out of memory"}[status]


@pytest.fixture
def cudart(monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: cudart.waited.append(list(cudart.locked)))
    monkeypatch.setattr(host_memory, "node_of", lambda device: None)
    yield cudart
    settle()  # what tests have left needs these, too


def test_tensors_fill_a_slab_of_the_sum_of_their_rooms_and_do_not_overlap():
    wanted = [(3, torch.float32), (0, torch.float32), (33, torch.bfloat16), (1, torch.int64), (16, torch.float32)]
    held = Slab(sum(room(numel * dtype.itemsize) for numel, dtype in wanted), device=CPU, pinned=True)
    taken = [held.take(numel, dtype) for numel, dtype in wanted]
    assert held.num_bytes == held.num_taken == 64 + 128 + 64 + 64
    assert not held.is_pinned  # a CPU reads what it likes
    assert [(tensor.numel(), tensor.dtype) for tensor in taken] == wanted
    assert all(tensor.data_ptr() % 64 == 0 and not tensor.any() for tensor in taken)
    for value, tensor in enumerate(taken):
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(taken))
    with pytest.raises(AssertionError, match="has no 4 after 320"):
        held.take(1, torch.float32)


def test_tensors_outlive_a_slab_that_is_closed():
    held = Slab(64, device=CPU, pinned=False)
    tensor = held.take(4, torch.float32).fill_(7.0)
    held.close()
    held.close()
    del held
    gc.collect()
    assert tensor.tolist() == [7.0] * 4


def test_a_slab_of_nothing_is_no_error(cudart):
    assert Slab(0, device=GPU, pinned=True).take(0, torch.float32).numel() == 0
    assert not cudart.locked


def test_pages_stay_locked_as_long_as_any_tensor_in_them_though_nobody_keeps_the_slab(cudart):
    taken = Slab(5000, device=GPU, pinned=True).take(1000, torch.float32)
    views = list(taken.fill_(3.0).split(500))
    del taken
    settle()
    assert cudart.locked == {views[0].data_ptr(): 5000}
    del views[0]
    settle()
    assert len(cudart.locked) == 1
    assert not cudart.waited
    assert views[0].tolist() == [3.0] * 500
    del views
    settle()
    assert not cudart.locked
    assert [len(locked) for locked in cudart.waited] == [1]  # a copy may be under way when the last tensor goes


def test_what_crosses_the_bus_is_locked_until_the_slab_is_closed_or_collected(cudart):
    ordinary, closed, collected = (Slab(5000, device=GPU, pinned=pinned) for pinned in (False, True, True))
    addresses = [held.take(1, torch.uint8).data_ptr() for held in (closed, collected)]
    assert cudart.locked == dict.fromkeys(addresses, 5000)  # no byte more
    assert [held.is_pinned for held in (ordinary, closed, collected)] == [False, True, True]
    closed.close()
    closed.close()
    assert list(cudart.locked) == addresses[1:]
    del collected
    settle()
    assert not cudart.locked


@pytest.mark.parametrize(
    ("limit", "todo"),
    [(1 << 16, r"raise the limit on locked memory, now 0\.062 MiB .*RLIMIT_MEMLOCK"), (-1, "give a smaller bound")],
)
def test_pages_that_cuda_does_not_lock_are_refused_with_the_limit_if_it_is_that(cudart, monkeypatch, limit, todo):
    cudart.status = 2
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    with pytest.raises(UserError, match=r"^offload.pinned: CUDA did not page-lock 1\.000 MiB .*out of memory") as said:
        Slab(1 << 20, device=GPU, pinned=True)
    assert re.search(todo, str(said.value))
    assert "\n" not in str(said.value)


def test_memory_that_is_not_there_is_refused_before_the_kernel_kills_the_run(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 30)
    with pytest.raises(UserError, match=r"^offload: a rank needs 2.00 GiB of host memory: 1.00 GiB are available"):
        Slab(2 << 30, device=CPU, pinned=False)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    with pytest.raises(UserError, match=r"a rank needs [\d,.]+ GiB of host memory: Cannot allocate memory"):
        Slab(1 << 60, device=CPU, pinned=False)


def test_pages_are_touched_and_locked_on_the_gpus_node(cudart, monkeypatch):
    where = []
    monkeypatch.setattr(host_memory, "node_of", lambda device: 1)
    monkeypatch.setattr(host_memory, "on_node", lambda node: where.append(node) or nullcontext())
    Slab(4096, device=GPU, pinned=True)
    assert where == [1]
