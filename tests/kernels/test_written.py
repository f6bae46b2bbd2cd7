"""What a user wrote into rounded weights: our kernel takes the same elements as PyTorch's operations, to the bit."""

import pytest
import torch

from zeroshard.kernels.written import BLOCK, carry_written
from zeroshard.zero.buffers.changed_values import take_where_it_differs

NUMBERS = [0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-40, float("nan")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, BLOCK, 2 * BLOCK + 7])
def test_the_masters_of_changed_elements_are_replaced_and_no_others(triton, random, device, dtype, numel):
    master = random(numel)
    numbers = torch.tensor(NUMBERS, device=device).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    master[: len(numbers)] = numbers[:numel]
    written = master.to(dtype)
    written[1::7] = 0.25
    written[2::13] = float("nan")
    written[numel // 2 : numel // 2 + len(numbers)] = numbers.to(dtype)[: numel - numel // 2]
    wanted, ours = master.clone(), master.clone()
    take_where_it_differs(wanted, written)
    carry_written(ours, written)
    assert torch.equal(_bits(ours), _bits(wanted))
    assert numel == 1 or not torch.equal(_bits(ours), _bits(master))


def _bits(values):
    return values.nan_to_num(nan=1234.5).view(torch.int32)


def test_nothing_at_all(triton, device):
    empty = torch.empty(0, device=device)
    carry_written(empty, empty.bfloat16())
    assert empty.shape == (0,)
