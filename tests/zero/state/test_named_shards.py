"""Pieces of the training state: together they are all of it, and any stage and world reads any other's."""

import pytest
import torch
from torch import nn

from nets import Net, muon_and_adamw, odd_net, rows
from same_results import Saved
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.zero import STAGES, NamedShard, Zero
from zeroshard.zero.core.layout import FlatLayout

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam fused": (torch.optim.Adam, {"lr": 1e-2, "fused": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Muon and AdamW": (torch.optim.Muon, {"lr": 1e-2}),
}


def _optimizers(zero, name):
    cls, kwargs = OPTIMIZERS[name]
    return muon_and_adamw(zero) if cls is torch.optim.Muon else [zero.optimizer(cls, **kwargs)]


def _steps(zero, optims, steps):
    for step in steps:
        # Every world sees the same rows, so that worlds of any size take the same steps, but for rounding.
        zero.model(rows(0, step)).square().mean().backward()
        for optim in optims:
            optim.step()
        zero.zero_grad()


def _save(comm, stage, optimizer, shard_size=None):
    """Pieces and weights after two steps, and the weights after two more."""
    zero = Zero(odd_net(), stage=stage, comm=comm, shard_size=shard_size)
    optims = _optimizers(zero, optimizer)
    _steps(zero, optims, range(2))
    copied = [NamedShard(s.name, s.kind, s.shape, s.interval, s.tensor.clone()) for s in zero.named_shards()]
    saved = zero.state_dict()
    _steps(zero, optims, range(2, 4))
    return copied, saved, zero.state_dict()


def _load(comm, stage, optimizer, saved, reader, shard_size=None):
    net = odd_net()
    with torch.no_grad():
        for tensor in (*net.parameters(), net.table):
            tensor.fill_(7)
    zero = Zero(net, stage=stage, comm=comm, shard_size=shard_size)
    optims = _optimizers(zero, optimizer)
    zero.load_named_shards(reader)
    loaded = zero.state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    again = [NamedShard(s.name, s.kind, s.shape, s.interval, s.tensor.clone()) for s in zero.named_shards()]
    _steps(zero, optims, range(2, 4))
    return again, zero.state_dict()


def test_each_rank_writes_its_part_of_pieces_that_are_whole(monkeypatch):
    """A replicated optimizer sees whole tensors on a GPU, and pieces that end where shards do on the CPU."""

    on_cpu = Saved([shards for shards, *_ in run_threads(lambda comm: _save(comm, 0, "AdamW"), 3)])
    monkeypatch.setattr(FlatLayout, "updated_by_all", lambda layout, device: (*layout.pieces(0, layout.padded_numel),))
    on_gpu = Saved([shards for shards, *_ in run_threads(lambda comm: _save(comm, 0, "AdamW"), 3)])
    assert on_gpu.tiled
    assert on_gpu.full.keys() == on_cpu.full.keys()
    for key, full in on_gpu.full.items():
        torch.testing.assert_close(full, on_cpu.full[key], rtol=0, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.redundant(but=["(1, 4, 2)-(0, 2, None)-SGD momentum"])
@pytest.mark.pairwise("wrote", "reads")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ((3, 4, 2), (1, 3, None)),
        ((1, 4, 2), (0, 2, None)),
        ((0, 3, None), (2, 4, 2)),
        ((2, 4, 4), (3, 4, 2)),
        ((3, 4, 1), (3, 6, 3)),
        ((2, 3, None), (2, 3, None)),
    ],
    ids=str,
)
def test_one_replica_writes_and_any_stage_world_and_shard_size_reads(wrote, reads, optimizer):
    stage, world_size, shard_size = wrote
    by_rank = run_threads(lambda comm: _save(comm, stage, optimizer, shard_size), world_size)
    assert [bool(shards) for shards, *_ in by_rank] == [rank < (shard_size or world_size) for rank in range(world_size)]
    saved, state = Saved([shards for shards, *_ in by_rank]), by_rank[0][1]
    assert saved.tiled
    stage, world_size, shard_size = reads
    loaded = run_threads(lambda comm: _load(comm, stage, optimizer, state, saved, shard_size), world_size)
    again = Saved([shards for shards, _ in loaded])
    assert again.tiled
    assert again.full.keys() == saved.full.keys()
    assert all(torch.equal(again.full[key], saved.full[key]) for key in saved.full)
    for _, weights in loaded:
        assert all(torch.equal(weights[name], full) for name, full in loaded[0][1].items())
        torch.testing.assert_close(dict(weights), dict(by_rank[0][2]), rtol=0, atol=1e-5)
        assert wrote != reads or all(torch.equal(weights[name], full) for name, full in by_rank[0][2].items())


@pytest.mark.redundant(but=["0"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_another_model_is_refused_by_name(stage):
    by_rank = run_threads(lambda comm: _save(comm, stage, "AdamW"), 2)
    saved = Saved([shards for shards, *_ in by_rank])

    def go(comm):
        net = Net(block=lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)))
        net.last = nn.Linear(6, 7)
        zero = Zero(net, stage=stage, comm=comm)
        with pytest.raises(ValueError, match=r"last\.(weight|bias): the checkpoint has no param of it; load it into"):
            zero.load_named_shards(saved)

    run_threads(go, 2)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_a_factored_state_has_a_shape_of_its_own_and_is_written_by_the_tensors_owner(stage):
    by_rank = run_threads(lambda comm: _save(comm, stage, "Adafactor")[0], 3)
    saved = Saved(by_rank)
    assert saved.kinds("first.weight") == {"param": (6, 6), "step": (), "row_var": (6, 1), "col_var": (1, 6)}
    assert saved.kinds("first.bias") == {"param": (6,), "step": (), "variance": (6,)}
    writers = [{shard.kind for shard in shards if shard.name == "first.weight"} for shards in by_rank]
    assert sorted(map(len, writers)) == [0, 0, 4]


def test_a_state_that_a_checkpoint_cannot_hold_is_named():
    class Listing(torch.optim.SGD):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                self.state[param]["seen"] = [object()]
            return super().step(closure)

    zero = Zero(odd_net(), comm=NullCommunicator(2))
    with pytest.warns(
        UserWarning, match="^optimizer: Listing keeps what no checkpoint can hold: seen/0: a object in an"
    ):
        optimizer = zero.optimizer(Listing, lr=0.1)
    _steps(zero, [optimizer], range(1))
    with pytest.raises(ValueError, match=r"^Listing: a checkpoint cannot hold seen/0: a object in .*; keep tensors"):
        list(zero.named_shards())


def test_a_buffer_of_another_shape_is_refused_and_not_read_in_part():
    def with_buffer(numel):
        net = Net()
        net.register_buffer("table", torch.arange(float(numel)))
        return Zero(net, 2, comm=LocalCommunicator())

    saved = with_buffer(5)
    reader = Saved([list(saved.named_shards())])
    with pytest.raises(UserError, match=r"^table: buffer saved with shape \(5,\), the model's is \(3,\); load it into"):
        with_buffer(3).load_named_shards(reader)
