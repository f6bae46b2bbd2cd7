from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from zeroshard.optim.named_shards import NamedShard, ShardReader


@dataclass
class EvenlySharded:
    """Whole tensors of which each rank owns an even share; remembers what it loaded."""

    comm: object
    tensors: dict[tuple[str, str], Tensor]
    loaded: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def _interval(self, numel):
        rank, world_size = self.comm.rank, self.comm.world_size
        return numel * rank // world_size, numel * (rank + 1) // world_size

    def named_shards(self):
        for (name, kind), tensor in self.tensors.items():
            start, stop = self._interval(tensor.numel())
            yield NamedShard(name, kind, tuple(tensor.shape), (start, stop), tensor.reshape(-1)[start:stop])

    def load_named_shards(self, reader: ShardReader):
        for name, kind in self.tensors:
            numel = self.tensors[name, kind].numel()
            self.loaded[name, kind] = reader.read(name, kind, self._interval(numel))


@pytest.fixture
def evenly_sharded():
    return EvenlySharded


@pytest.fixture
def some_tensors():
    """Odd sizes, scalars and every family of dtypes."""
    torch.manual_seed(0)
    return {
        ("block.weight", "param"): torch.randn(7, 3),
        ("block.weight", "exp_avg"): torch.randn(7, 3, dtype=torch.float64),
        ("block.weight", "step"): torch.tensor(11.0),
        ("half", "param"): torch.randn(13).to(torch.bfloat16),
        ("count", "buffer"): torch.tensor(2**40),
        ("mask", "buffer"): torch.tensor([True, False, True]),
        ("empty", "param"): torch.empty(0, 4),
    }
