"""A checkpoint that is written while training goes on holds the state of its own step, whatever the strategy."""

import math
import re
import threading
from functools import partial
from operator import ge
from pathlib import Path

import pytest

from tiny_runs import train_on
from zeroshard import checkpoint
from zeroshard.checkpoint import api
from zeroshard.checkpoint.diff import differences
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.train.loop import loop
from zeroshard.train.loop.watchdog import PATIENCE_S

NUM_STEPS = 5


class _Heard:
    """What the watchdogs of two ranks are told, in order."""

    def __init__(self):
        self.words, self._changed = [[], []], threading.Condition()

    def tell(self, rank, word):
        with self._changed:
            self.words[rank].append(word)
            self._changed.notify_all()

    def wait_until_both_hear_more(self, do):
        with self._changed:
            more = [len(words) + 1 for words in self.words]
            do()
            assert self._changed.wait_for(lambda: all(map(ge, map(len, self.words), more)), 60)

    def train(self, config):
        told = run_threads(lambda comm: train_on(comm, config, alive=partial(self.tell, comm.rank))[0], 2)
        assert told == [0, 0]


@pytest.mark.redundant
def test_every_rank_hears_that_one_of_them_gets_on_with_the_last_save(tiny_config, monkeypatch):
    """Or the watchdogs of those that have written would end the run, which waits for the slowest disk."""
    heard, write = _Heard(), api.write_rank

    def slow(folder, comm, shards, progress, reading):
        for _ in range(5) if comm.rank == 0 else ():
            heard.wait_until_both_hear_more(lambda: progress(1))
        write(folder, comm, shards, progress, reading)

    monkeypatch.setattr(api, "write_rank", slow)
    heard.train(tiny_config(eval_interval=0))
    for words in heard.words:
        *until_saved, last = words
        # Five steps and what comes after each; the last step; an evaluation, which may compile, of two batches a rank.
        assert until_saved[:14] == [0.0] * 11 + [PATIENCE_S] + [0.0] * 2
        assert set(until_saved[14:]) == {PATIENCE_S}
        assert last == math.inf  # all is saved


@pytest.mark.redundant
def test_a_batch_of_an_evaluation_is_progress(tiny_config):
    heard = []
    config = tiny_config(max_steps=2, eval_interval=1, ema_decay=0.9)
    assert train_on(LocalCommunicator(), config, alive=heard.append)[0] == 0
    # A step; three batches for the weights and three for their average; what comes after them.
    assert heard[:8] == [0.0] * 8


def _checkpoints(config, world_size):
    """Of each step that was saved: its folder and manifest."""
    assert {status for status, _ in run_threads(lambda comm: train_on(comm, config), world_size)} == {0}
    folders = sorted((Path(config.out) / "checkpoints").glob("step-*"))
    return {folder.name: checkpoint.open_manifest(folder) for folder in folders}


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("zero0", 2), ("zero3", 2), ("zero1-torch", 1)]
    + [pytest.param(*each, marks=pytest.mark.soak) for each in (("zero1", 2), ("zero2", 2), ("ddp", 1))],
)
def test_updates_that_come_before_it_is_written_are_not_in_it(
    tiny_config, monkeypatch, tmp_path, process_group, strategy, world_size
):
    same = {"strategy": strategy, "checkpoint_interval": 2, "max_steps": NUM_STEPS, "ema_decay": 0.9}
    still = _checkpoints(tiny_config(out=str(tmp_path / "still"), checkpoint_async=False, **same), world_size)
    write, take_step = api.write_rank, loop.take_step
    updates, updated = dict.fromkeys(range(world_size), 0), threading.Condition()
    begun_after = []  # of each write: of which step, and how many updates its rank had made when it began

    def counted(run, *args):
        record = take_step(run, *args)
        with updated:
            updates[run.strategy.comm.rank] += 1
            updated.notify_all()
        return record

    def late(folder, comm, *args):
        step = int(re.search(r"step-(\d+)", folder.name)[1])
        with updated:
            assert updated.wait_for(lambda: updates[comm.rank] > step or step == NUM_STEPS, 120)
            begun_after.append((step, updates[comm.rank]))
        write(folder, comm, *args)

    monkeypatch.setattr(api, "write_rank", late)
    monkeypatch.setattr(loop, "take_step", counted)
    behind = _checkpoints(tiny_config(out=str(tmp_path / "behind"), **same), world_size)
    assert sorted(begun_after) == sorted([(2, 3), (4, 5), (5, 5)] * world_size)
    assert list(behind) == list(still) == [f"step-{step:08d}" for step in (2, 4, 5)]
    for name, saved in behind.items():
        assert not checkpoint.verify(saved[0])
        told = [line for line in differences(still[name], saved) if not line.startswith("extra.config.")]
        assert told == []


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"checkpoint_interval": -1}, [4, 6]),  # at each evaluation and at the end, the newest two
        ({"checkpoint_interval": -1, "keep_checkpoints": 0}, [2, 4, 6]),
        ({"checkpoint_interval": -1, "keep_checkpoints": 1, "keep_every": 2}, [2, 4, 6]),
        ({"checkpoint_interval": -1, "keep_every": 2}, [2, 4, 6]),
        ({"checkpoint_interval": -1, "eval_interval": 0}, [6]),
        ({"checkpoint_interval": 0}, [6]),
        ({"checkpoint_interval": 1}, [1, 2, 3, 4, 5, 6]),
        ({"checkpoint_interval": 3, "keep_checkpoints": 1}, [6]),
    ],
)
def test_which_checkpoints_a_run_leaves(tiny_config, settings, steps):
    config = tiny_config(**{"max_steps": 6, "eval_interval": 2, **settings})
    status, run = train_on(LocalCommunicator(), config)
    assert status == 0
    assert sorted(found.step for found in checkpoint.find(run.folder / "checkpoints")) == steps
