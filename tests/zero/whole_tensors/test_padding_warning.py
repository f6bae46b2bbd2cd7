"""Whole tensors on many ranks: buffers that are mostly padding are warned of."""

import warnings

import pytest
import torch

from nets import Net
from zeroshard import Zero
from zeroshard.comm import NullCommunicator


def _with_muon(shard_size):
    net = Net()
    zero = Zero(net, stage=1, units=net.blocks, comm=NullCommunicator(128), shard_size=shard_size)
    zero.optimizer(torch.optim.Muon, [param for param in net.parameters() if param.dim() == 2], lr=0.02)


def test_groups_much_larger_than_the_number_of_tensors_are_warned_of():
    with pytest.warns(UserWarning, match=r"over 64 ranks make buffers \d+ times as large .* shard_size"):
        _with_muon(64)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        _with_muon(4)
        _with_muon(128)  # shards end with what each rank owns, where there are no replicas
    assert others == []
