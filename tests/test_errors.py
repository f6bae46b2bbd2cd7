"""What is told of errors that are the machine's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zeroshard.errors import is_out_of_memory, memory_line


def raised_by(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    return caught.value


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (raised_by(lambda: torch.empty(1 << 58, dtype=torch.uint8)), "268,435,456.00 GiB"),
        (raised_by(lambda: np.empty(1 << 58, dtype=np.uint8)), "256. PiB"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79 GiB"), "2.50 GiB"),
    ],
)
def test_memory_that_ran_out_is_told_with_what_was_asked_for(error, asked):
    assert is_out_of_memory(error)
    assert memory_line(error, "buy some") == f"memory: ran out, where {asked} more were asked for; buy some"


def test_where_nobody_said_how_much_was_asked_for_none_is_told():
    assert is_out_of_memory(MemoryError())
    assert memory_line(MemoryError(), "buy some") == "memory: ran out; buy some"


def test_other_errors_are_not_taken_for_it():
    assert not is_out_of_memory(RuntimeError("a bug"))
