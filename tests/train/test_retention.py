"""Ruined weights do not push good checkpoints out."""

import json
import math
from pathlib import Path

import pytest
import torch

from zeroshard import checkpoint
from zeroshard.checkpoint import store
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import ExitStatus
from zeroshard.train.loop.loop import train
from zeroshard.train.loop.retention import Retention
from zeroshard.train.setup.build import build_run


def _make(folder, *steps):
    for step in steps:
        path = folder / checkpoint.step_name(step)
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")


def _steps(folder):
    return sorted(found.step for found in checkpoint.find(folder) if found.complete)


class _Kept:
    """A `Retention` of the newest ``newest``, told of saves and steps in one line each."""

    def __init__(self, folder, newest, every=0):
        self.folder, self.retention = folder, Retention(folder, newest, every)

    def save(self, step, *, proven=False, skipping=False):
        self.retention.wait()
        self.retention.began(step, proven=proven, skipping=skipping)
        _make(self.folder, step)
        self.retention.completed()

    def step(self, *, taken=True):
        if taken:
            self.retention.proved()
        self.retention.wait()
        return _steps(self.folder)


def test_a_checkpoint_counts_once_a_later_loss_was_finite(tmp_path):
    kept = _Kept(tmp_path, 1)
    kept.save(2)
    assert kept.step() == [2]
    kept.save(4)
    assert kept.step(taken=False) == [2, 4]
    assert kept.retention.newest_sound() == tmp_path / "step-00000002"
    assert kept.step() == [4]
    kept.save(6, proven=True)
    kept.retention.finish(skipping=False)
    assert _steps(tmp_path) == [6]
    kept.save(8)
    kept.retention.finish(skipping=False)
    assert _steps(tmp_path) == [6, 8]  # the run ended before any loss of 8
    kept.retention.close()


def test_what_is_saved_while_steps_are_skipped_counts_as_none_that_is_kept_and_deletes_nothing(tmp_path):
    kept = _Kept(tmp_path, 2, every=10)
    for step in (1, 2, 3):
        kept.save(step)
        kept.step()
    assert _steps(tmp_path) == [2, 3]
    for step in (4, 5, 10):
        kept.save(step, skipping=True)
        assert kept.step(taken=False)[:2] == [2, 3]
    kept.retention.finish(skipping=True)
    assert _steps(tmp_path) == [2, 3, 4, 5, 10]
    assert kept.retention.newest_sound() == tmp_path / "step-00000003"
    kept.save(11)
    assert kept.step() == [3, 10, 11]
    kept.retention.close()


def test_one_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, capsys):
    kept = _Kept(tmp_path, 1)
    kept.save(1)
    kept.save(2)
    monkeypatch.setattr(store, "remove_named", lambda path: (_ for _ in ()).throw(OSError(13, "Permission denied")))
    assert kept.step() == [1, 2]
    said = f"warning: {tmp_path}: older checkpoints could not be deleted: [Errno 13] Permission denied\n"
    assert capsys.readouterr().err == said
    kept.retention.close()


@pytest.mark.redundant(but=["1"])
@pytest.mark.parametrize("keep", [1, 2])
def test_weights_that_an_update_ruins_leave_the_good_checkpoints_and_the_line_names_the_newest(
    tiny_config, capsys, keep
):
    saves = {"checkpoint_interval": 1, "checkpoint_async": False, "keep_checkpoints": keep}
    made = tiny_config(max_steps=20, eval_interval=0, optim={"max_not_finite": 3}, **saves)
    run, num_steps = build_run(made, LocalCommunicator(), torch.device("cpu")), 0

    def ruin():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:  # after the loss and the norm of step 5, and before its update
            for group in run.strategy.optimizer.param_groups:
                for piece in group["params"]:
                    piece.detach().fill_(math.nan)
        return False

    try:
        assert train(run, ruin) == ExitStatus.NOT_FINITE
    finally:
        run.close()
    folder = Path(made.out) / "checkpoints"
    assert _steps(folder) == [*range(5 - keep, 5), 5, 6, 7]  # 5 is ruined, though its step was taken
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.endswith(f"and --resume {folder}/step-00000004, the newest after which a loss was finite")
    saved = {step: checkpoint.read_manifest(folder / checkpoint.step_name(step)).extra["guard"] for step in (4, 5, 7)}
    assert [guard["not_finite_in_a_row"] for guard in saved.values()] == [0, 0, 2]
    again = Retention(folder, keep, 0)  # of a run that resumes there
    again.completed()
    again.proved()
    again.finish(skipping=False)
    again.close()
    assert _steps(folder) == [*range(5 - keep + 1, 5), 5, 6, 7]


def test_a_replica_that_is_ruined_between_outer_steps_pushes_no_good_checkpoint_out(tiny_config):
    saves = {"checkpoint_interval": 1, "checkpoint_async": False, "keep_checkpoints": 1}
    local = {"strategy": "zero1", "shard_size": 1, "local_steps": {"every": 8}}
    made = tiny_config(max_steps=8, eval_interval=0, optim={"max_not_finite": 20}, **saves, **local)

    def go(comm):
        run = build_run(made, comm, torch.device("cpu"))
        step = run.local_steps.step

        def ruin(**kwargs):
            if comm.rank == 1 and run.local_steps.num_steps == 3:  # the update of step 4 has just been made
                for piece in run.strategy.zero.pieces():
                    piece.data.fill_(math.nan)
            return step(**kwargs)

        run.local_steps.step = ruin
        try:
            return train(run)
        finally:
            run.close()

    assert run_threads(go, 2) == [ExitStatus.NOT_FINITE] * 2  # at the outer step
    assert _steps(Path(made.out) / "checkpoints") == [3, 4, 5, 6, 7]  # 4 has the ruined replica


def test_a_damaged_newer_checkpoint_takes_no_place_from_those_of_the_resumed_run(tiny_config, capsys):
    made = tiny_config(max_steps=4, eval_interval=0, checkpoint_interval=2)
    for changes in ({}, {"max_steps": 8, "resume": "auto", "checkpoint_interval": 1, "keep_checkpoints": 1}):
        run = build_run(made.model_copy(update=changes), LocalCommunicator(), torch.device("cpu"))
        assert train(run) == ExitStatus.OK
        run.close()
        folder = Path(made.out) / "checkpoints"
        if not changes:
            (file,) = (folder / "step-00000004").glob("*.safetensors")
            file.write_bytes(file.read_bytes()[:-1] + b"\7")
    assert "were set aside: step-00000004.aside" in capsys.readouterr().err
    assert _steps(folder) == [8]
    assert json.loads((Path(made.out) / "summary.json").read_text())["last_checkpoint_step"] == 8
