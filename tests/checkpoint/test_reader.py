"""A rank reads the bytes that it needs and no others, and nobody holds a whole model."""

import pytest
import torch
from torch import nn

from zeroshard import Zero, checkpoint
from zeroshard.comm import LocalCommunicator, run_threads


def _zero(comm, stage):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    zero = Zero(model, stage=stage, units=list(model), comm=comm)
    optim = zero.optimizer(torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optim.step()
    return zero


class _Counting:
    def __init__(self, reader):
        self.reader, self.sizes = reader, []

    def kinds(self, name):
        return self.reader.kinds(name)

    def read(self, name, kind, interval):
        self.sizes.append(interval[1] - interval[0])
        return self.reader.read(name, kind, interval)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_reads_its_own_elements_and_one_piece_of_one_tensor_at_a_time(tmp_path, world_size):
    run_threads(lambda comm: checkpoint.save(tmp_path / "c", _zero(comm, 3), step=1), 2)
    folder, manifest = checkpoint.open_manifest(tmp_path / "c")

    def rank_main(comm):
        zero = _zero(comm, 3)
        with checkpoint.CheckpointReader(folder, manifest) as reader:
            counting = _Counting(reader)
            zero.load_named_shards(counting)
        own = sum(shard.tensor.numel() for shard in zero.named_shards() if shard.kind != "step")
        num_scalars = sum(size == 1 for size in counting.sizes)
        assert own <= sum(counting.sizes) <= own + num_scalars
        assert max(counting.sizes) <= 64  # the largest tensor
        return own

    assert sum(run_threads(rank_main, world_size)) == 3 * 4 * (64 + 8)


def test_a_read_tensor_is_the_callers_own(tmp_path, evenly_sharded, some_tensors):
    checkpoint.save(tmp_path / "c", evenly_sharded(LocalCommunicator(), some_tensors), step=1)
    opened = checkpoint.open_manifest(tmp_path / "c")
    with checkpoint.CheckpointReader(*opened) as reader:
        first = reader.read("half", "param", (0, 13))
        first.zero_()
        assert torch.equal(reader.read("half", "param", (0, 13)), some_tensors["half", "param"])
    assert first.count_nonzero() == 0  # still there when the file is closed
    assert checkpoint.verify(tmp_path / "c") == ()
