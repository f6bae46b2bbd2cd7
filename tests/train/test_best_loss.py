"""The checkpoint of the lowest validation loss is kept and named, and a run stops when that is long ago."""

from pathlib import Path

import pytest
import torch

from tiny_runs import summary_of, train_on
from zeroshard import checkpoint
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.train.inference.generate import checkpoint_of
from zeroshard.train.loop.best_loss import BestLoss
from zeroshard.train.loop.evaluation import Evaluation

LOSSES = [9.0, 3.0, 2.0, 2.5, 2.0, float("nan"), 1.0, 4.0]  # of the evaluations, the one before the first step too


@pytest.fixture
def train_with(tiny_config, monkeypatch):
    """`train_with(world_size, **changes)`: a run whose evaluations come to `LOSSES`; its configuration and summary."""

    def go(world_size=1, losses=LOSSES, **changes):
        settings = {"max_steps": 7, "eval_interval": 1, "keep_best": True, "keep_checkpoints": 1} | changes
        config = tiny_config(**settings)

        monkeypatch.setattr(Evaluation, "losses", lambda self, step: {"val_loss": losses[step]})
        with torch.random.fork_rng():
            found = run_threads(lambda comm: train_on(comm, config), world_size)
        assert [status for status, _ in found] == [0] * world_size
        return config, summary_of(config.out)

    return go


def kept(config):
    return [found.step for found in checkpoint.find(Path(config.out) / "checkpoints")]


@pytest.mark.redundant(but=["1"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_best_checkpoint_stays_beside_the_newest(train_with, world_size):
    config, summary = train_with(world_size, max_steps=5)
    assert kept(config) == [5, 2]
    assert (summary["best_step"], summary["best_val_loss"]) == (2, 2.0)
    assert checkpoint.read_manifest(Path(config.out) / "checkpoints" / "best").step == 2
    assert checkpoint.read_manifest(checkpoint_of(Path(config.out), "best")).step == 2


@pytest.mark.redundant
def test_a_better_one_takes_its_name_and_its_place(train_with):
    config, summary = train_with()
    assert summary["best_step"] == 6
    assert kept(config) == [7, 6]
    assert checkpoint.read_manifest(Path(config.out) / "checkpoints" / "best").step == 6


def test_a_run_that_goes_on_knows_its_best(train_with):
    train_with(max_steps=3)
    config, summary = train_with(max_steps=7, resume="auto")
    assert (summary["step"], summary["best_step"], summary["status"]) == (7, 6, "ok")
    assert kept(config) == [7, 6]


def test_without_the_setting_no_checkpoint_is_the_best(train_with):
    config, summary = train_with(keep_best=False)
    assert kept(config) == [7]
    assert summary["best_step"] == 6
    with pytest.raises(UserError, match=r"^weights: .* keeps no best checkpoint; train with --keep-best, or use last"):
        checkpoint_of(Path(config.out), "best")


def test_nan_is_never_the_best():
    best = BestLoss()
    assert not best.record(1, float("nan"))
    assert best.state_dict() == {"step": None, "loss": None}
    assert best.record(2, 5.0)
    assert not best.record(3, 5.0)
