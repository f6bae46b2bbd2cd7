"""Tensors that a writer reads in place: what it reads is what was saved, whatever the loop does after `settle`."""

from __future__ import annotations

import threading

import torch

from zeroshard.checkpoint.copy_on_write import CopyOnWrite
from zeroshard.checkpoint.host_copies import HostMemory


def _shared(*tensors):
    return CopyOnWrite(list(zip(tensors, HostMemory().places(tensors), strict=True)))


def test_what_was_read_before_the_update_is_never_copied():
    tensors = [torch.randn(5), torch.randn(3).bfloat16(), torch.tensor([7])]
    shared = _shared(*tensors)
    for tensor in tensors:
        with shared.reading(tensor) as content:
            assert content is tensor
    assert shared.settle() == 0


def test_what_was_not_read_is_copied_from_the_end_and_read_from_the_copy():
    first, second, third = torch.randn(5), torch.randn(3).bfloat16(), torch.tensor([7])
    expected = [tensor.clone() for tensor in (first, second, third)]
    shared = _shared(first, second, third)
    with shared.reading(first):
        pass
    assert shared.settle() == 3 * 2 + 8
    for tensor in (first, second, third):
        tensor.zero_()
    with shared.reading(second) as content:
        assert torch.equal(content, expected[1])
    with shared.reading(third) as content:
        assert torch.equal(content, expected[2])
    assert shared.settle() == 0


def test_an_update_waits_for_what_is_being_read():
    tensor, reading, read = torch.ones(4), threading.Event(), threading.Event()
    shared, seen = _shared(tensor), []

    def write():
        with shared.reading(tensor) as content:
            reading.set()
            assert read.wait(600)
            seen.append(content.clone())

    def update():
        shared.settle()
        tensor.zero_()

    writer, updater = threading.Thread(target=write), threading.Thread(target=update)
    writer.start()
    assert reading.wait(600)
    updater.start()
    updater.join(0.1)
    assert updater.is_alive()
    read.set()
    writer.join(20)
    updater.join(20)
    assert torch.equal(seen[0], torch.ones(4))
    assert torch.equal(tensor, torch.zeros(4))


def test_a_tensor_that_was_never_lent_comes_back_as_it_is():
    tensor = torch.ones(2)
    with CopyOnWrite().reading(tensor) as content:
        assert content is tensor
