"""Memory inside operations of a GPU, beside an H100's allocator: GPT-2 124M and 1.5B, 8 and 4 rows of 1,024 tokens."""

import pytest
import torch

from zeroshard.lab.predict.scratch import scratch_bytes, sum_over_rows_bytes
from zeroshard.lab.predict.work import Work

MIB = 2**20


@pytest.mark.parametrize(("rows", "width", "mib"), [(8192, 3072, 132.0), (4096, 6400, 134.375)])
def test_partial_sums_of_a_bias_s_gradient_are_those_that_the_allocator_saw(rows, width, mib):
    assert sum_over_rows_bytes(rows, width) == mib * MIB


def test_few_rows_or_columns_are_added_by_one_thread_block():
    assert sum_over_rows_bytes(1000, 3072) == 0
    assert sum_over_rows_bytes(8192, 100) == 0


def test_only_sums_over_rows_and_backwards_of_attention_have_scratch():
    x, work = torch.zeros(8, 1024, 3072, dtype=torch.bfloat16, device="meta"), Work(0, 0, "bfloat16")
    add_up = torch.ops.aten.sum.dim_IntList
    assert scratch_bytes(work, add_up, (x, [0, 1])) == scratch_bytes(work, add_up, (x, [0, -2])) == 132 * MIB
    assert scratch_bytes(work, add_up, (x, [2])) == scratch_bytes(work, torch.ops.aten.add.Tensor, (x, x)) == 0
    attention = Work(1, 0, "bfloat16", attention=True, shape=(96, 1024, 1024, 64), backward=True)
    assert scratch_bytes(attention, torch.ops.aten.mm.default, ()) == 24 * MIB
