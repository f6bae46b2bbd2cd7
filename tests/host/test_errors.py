"""What is told of errors that are the machine's, and which name was probably meant."""

import numpy as np
import pytest
import torch

from zeroshard.host.errors import is_of_storage, is_out_of_memory, memory_line, nearest_name, storage_line


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


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "run: [Errno 28] No space left on device; free space, then resume"),
        (OSError(13, "Permission denied"), "run: [Errno 13] Permission denied; see that it is there and may be"),
        (FileNotFoundError("run was removed"), "run: run was removed; see that it is there and may be written"),
    ],
)
def test_a_disk_or_folder_that_failed_is_told_with_what_to_do(error, line):
    assert is_of_storage(error)
    assert storage_line("run", error, "then resume").startswith(line)


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(111, "refused"), TimeoutError(), OSError(98, "in use"), OSError(24, "many files")]
)
def test_a_network_or_a_limit_of_the_process_is_no_disk(error):
    assert not is_of_storage(error)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--gpsu", "--gpus"),  # --gpu has more letters in the same order
        ("--stratgy", "--strategy"),
        ("--rl", "--lr"),
        ("--gpuss", "--gpus"),
        ("--gp", "--gpu"),
        ("--optimiser", "--optimizer"),
        ("--wieght-decay", "--weight-decay"),
        ("--qqqqqqqq", None),
    ],
)
def test_a_name_of_the_same_letters_in_another_order_is_nearer_than_any_other(given, meant):
    known = ["--gpu", "--gpus", "--strategy", "--lr", "--optimizer", "--weight-decay"]
    assert nearest_name(given, known) == meant
    assert nearest_name(given, iter(reversed(known))) == meant
