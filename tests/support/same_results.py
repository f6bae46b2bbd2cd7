"""What a run of several ranks returned beside what one process did, and what a checkpoint holds."""

from typing import Any

import pytest
import torch

from zeroshard import checkpoint
from zeroshard.zero import NamedShard

TOLERANCE = 1e-4


def same(found: Any, expected: Any) -> None:
    """Assert that two structures of dicts, lists, tensors and numbers agree, floating-point ones within a tolerance."""
    assert type(found) is type(expected), found
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
    else:
        assert found == expected


class Saved:
    """A checkpoint in memory: whole tensors by name and kind, put together from every rank's pieces."""

    def __init__(self, by_rank: list[list[NamedShard]]) -> None:
        self.full: dict[tuple[str, str], torch.Tensor] = {}
        count: dict[tuple[str, str], torch.Tensor] = {}
        for shard in (shard for shards in by_rank for shard in shards):
            key, cut = (shard.name, shard.kind), slice(*shard.interval)
            whole = self.full.setdefault(key, torch.zeros(shard.shape, dtype=shard.tensor.dtype))
            assert (whole.shape, shard.tensor.dim()) == (shard.shape, 1)
            whole.view(-1)[cut] = shard.tensor
            count.setdefault(key, torch.zeros(whole.numel(), dtype=torch.int64))[cut] += 1
        self.tiled = all(times.eq(1).all() for times in count.values())

    def kinds(self, name: str) -> dict[str, tuple[int, ...]]:
        return {kind: tuple(tensor.shape) for (of, kind), tensor in self.full.items() if of == name}

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> torch.Tensor:
        return self.full[name, kind].flatten()[slice(*interval)].clone()


def contents(path: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint, whole, by name and kind."""
    with checkpoint.CheckpointReader(*checkpoint.open_manifest(path)) as reader:
        return {
            (name, kind): reader.read(name, kind, (0, torch.Size(shape).numel())).view(shape)
            for name in reader.names()
            for kind, shape in reader.kinds(name).items()
        }
