"""A checkpoint that is written while training goes on holds the state of its own step, whatever the strategy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zeroshard import checkpoint
from zeroshard.checkpoint import api
from zeroshard.checkpoint.diff import differences
from zeroshard.comm import run_threads
from zeroshard.train.build import build_run
from zeroshard.train.loop import train

CPU = torch.device("cpu")


def _checkpoints(config, world_size):
    """Of each step that was saved: its folder and manifest."""

    def rank_main(comm):
        run = build_run(config, comm, CPU)
        try:
            return train(run)
        finally:
            run.close()

    assert set(run_threads(rank_main, world_size)) == {0}
    folders = sorted((Path(config.out) / "checkpoints").glob("step-*"))
    return {folder.name: checkpoint.open_manifest(folder) for folder in folders}


@pytest.fixture
def process_group(tmp_path):
    """This process alone, for those that stand on torch.distributed."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("strategy", "world_size"), [("zero0", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("ddp", 1), ("zero1-torch", 1)]
)
def test_updates_that_come_before_it_is_written_are_not_in_it(
    tiny_config, monkeypatch, tmp_path, process_group, strategy, world_size
):
    same = {"strategy": strategy, "checkpoint_interval": 2, "max_steps": 5, "ema_decay": 0.9}
    still = _checkpoints(tiny_config(out=str(tmp_path / "still"), checkpoint_async=False, **same), world_size)
    write = api.write_rank

    def late(*args):
        time.sleep(0.3)  # updates come first
        write(*args)

    monkeypatch.setattr(api, "write_rank", late)
    behind = _checkpoints(tiny_config(out=str(tmp_path / "behind"), **same), world_size)
    assert list(behind) == list(still) == [f"step-{step:08d}" for step in (2, 4, 5)]
    for name, saved in behind.items():
        assert not checkpoint.verify(saved[0])
        told = [line for line in differences(still[name], saved) if not line.startswith("extra.config.")]
        assert told == []
