"""Adapters in a checkpoint that may say anything are merged, or refused in a line."""

import pytest
import torch

from same_results import Saved
from zeroshard.checkpoint.read_as import MergedWeights
from zeroshard.host.errors import UserError
from zeroshard.models.adapters import adapted_name, adapters_of

NAME = "block.weight"  # [out, in] = [4, 3]
A, B = adapters_of(adapted_name(NAME))


def reader_of(tensors):
    reader = Saved([])
    reader.full = {(name, "param"): tensor for name, tensor in tensors.items()}
    return reader


def saved(**changes):
    tensors = {adapted_name(NAME): torch.ones(4, 3), A: torch.rand(2, 3), B: torch.rand(4, 2)}
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


@pytest.mark.parametrize("interval", [(0, 12), (0, 5), (4, 9), (11, 12)])
@pytest.mark.parametrize("transposed", [False, True])
def test_any_interval_is_that_of_the_merged_weight(interval, transposed):
    tensors = saved()
    if transposed:
        tensors[adapted_name(NAME)] = torch.ones(3, 4)
    product = tensors[B] @ tensors[A]
    whole = tensors[adapted_name(NAME)] + 0.5 * (product.t() if transposed else product)
    reader = MergedWeights(reader_of(tensors), 0.5, {NAME} if transposed else ())
    torch.testing.assert_close(reader.read(NAME, "param", interval), whole.flatten()[slice(*interval)])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({A: None}, "has no matrix of this adapter"),
        ({B: None}, "has no matrix of this adapter"),
        ({A: torch.rand(6)}, "has no matrix of this adapter"),
        ({A: torch.rand(3, 3)}, "its adapters have shapes"),
        ({B: torch.rand(5, 2)}, "its adapters have shapes"),
        ({adapted_name(NAME): torch.ones(3, 4)}, "its adapters have shapes"),
        ({adapted_name(NAME): torch.ones(12)}, "its adapters have shapes"),
        ({adapted_name(NAME): torch.ones(())}, "its adapters have shapes"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(changes, why):
    reader = MergedWeights(reader_of(saved(**changes)), 0.5)
    with pytest.raises(UserError, match=f"block.*: .*{why}.*; take a checkpoint"):
        reader.read(NAME, "param", (0, 1))
