"""Disks that are full, folders that are read-only, removed, or another run's: the run goes on and says so."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import forked
from tiny_runs import built
from zeroshard import checkpoint
from zeroshard.checkpoint import store
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import ExitStatus, FirstRankStorageError, UserError
from zeroshard.train.loop.loop import train
from zeroshard.train.setup.build import build_run
from zeroshard.train.setup.corpus import open_corpus
from zeroshard.train.start import run_training
from zeroshard.train.state.lock import LOCK, RunLock
from zeroshard.train.state.saved_run import newest_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def config(tiny_config):
    """`config(**changes)`: 6 steps of milliseconds, a checkpoint every 2."""
    return partial(tiny_config, eval_interval=0, checkpoint_interval=2)


def _train(config, at=None, world_size=1, comm=None):
    """Train; ``at[step]()`` is called by rank 0 while that step (from 1) is taken. Each rank's status."""

    def rank_main(comm):
        run = build_run(config, comm, CPU)
        steps = iter(range(1, 1000))

        def at_step():
            step = next(steps)
            if comm.rank == 0 and step in (at or {}):
                at[step]()
            return False

        try:
            return train(run, at_step)
        finally:
            run.close()

    return rank_main(LocalCommunicator()) if world_size == 1 else run_threads(rank_main, world_size)[0]


def _limit_files(num_bytes):
    """No file of this process may grow beyond ``num_bytes``: what a full disk looks like to a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _said(capsys, what):
    return [line for line in capsys.readouterr().err.splitlines() if what in line]


def _steps(folder):
    return [found.step for found in checkpoint.find(Path(folder) / "checkpoints") if found.complete]


def _is_lost(line, config):
    what = "the state of step 6 is lost (its checkpoint was removed while the run wrote there), there is no checkpoint;"
    return line.startswith(f"error: {config.out}/checkpoints: {what} ")


def _leftovers(folder):
    return [entry.name for entry in Path(folder).glob("checkpoints/.*")]


@pytest.mark.redundant(but=["1-False"])
@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_ends_no_run_each_failure_is_told_and_status_five_says_that_nothing_was_kept(
    config, capsys, background, world_size
):
    status = _train(config(checkpoint_async=background), {1: lambda: _limit_files(16_000)}, world_size)
    err = capsys.readouterr().err.splitlines()
    assert status == ExitStatus.STORAGE == 5
    warnings = [line for line in err if line.startswith("warning: step")]
    assert [line.split(":")[1] for line in warnings] == [" step 2", " step 4", " step 6"]
    assert all("File too large" in line and "there is none yet, the run continues" in line for line in warnings)
    assert err[-1].startswith(
        f"error: {config().out}/checkpoints: the state of step 6 is lost ([Errno 27] File too lar"
    )
    assert "), there is no checkpoint; free space or choose another --out, then start again" in err[-1]
    assert _steps(config().out) == []
    assert _leftovers(config().out) == []  # what was written is freed
    events = [json.loads(line) for line in (Path(config().out) / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in events if "error" in event] == [2, 4, 6]
    assert events[-1]["status"] == "storage"


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("num_bytes", [0, 100], ids=["the lock", "the configuration"])
def test_a_disk_that_is_full_at_the_start_is_told_in_a_line_and_ends_in_status_five(config, capsys, num_bytes):
    made = config()
    open_corpus(made, LocalCommunicator(), 1)  # prepares it
    _limit_files(num_bytes)
    assert run_training(made) == ExitStatus.STORAGE == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {made.out}: [Errno 27] File too large")
    assert line.endswith("; free space, then start again with --resume auto")


@pytest.mark.usefixtures("limits")
def test_where_rank_zero_meets_a_full_disk_the_others_end_as_it_does_and_say_nothing(config):
    made = config()
    open_corpus(made, LocalCommunicator(), 1)

    def rank_main(comm):
        with pytest.raises(OSError, match="File too large") as caught:
            built(made, comm)
        return isinstance(caught.value, FirstRankStorageError)

    _limit_files(100)
    assert run_threads(rank_main, 2) == [False, True]


@pytest.mark.usefixtures("limits")
def test_the_last_good_checkpoint_stays_and_the_disk_may_become_free_again(config, capsys):
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    made = config(max_steps=10, checkpoint_async=False, keep_checkpoints=1)
    at = {3: lambda: _limit_files(16_000), 7: lambda: _limit_files(soft)}
    seen = {}
    at[6] = lambda: seen.update(kept=_steps(made.out))
    assert _train(made, at) == ExitStatus.OK
    assert seen["kept"] == [2]
    warnings = _said(capsys, "warning: step")
    assert len(warnings) == 2
    assert all("step 2 is the last good one" in line for line in warnings)
    assert _steps(made.out) == [10]
    assert checkpoint.verify(Path(made.out) / "checkpoints" / "step-00000010") == ()


@pytest.mark.usefixtures("limits")
def test_a_run_whose_last_save_fails_ends_in_status_five_names_what_is_there_and_exports_say_so(config, capsys):
    made = config(checkpoint_async=False)
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    status = _train(made, {3: lambda: _limit_files(16_000)})
    _limit_files(soft)
    assert status == ExitStatus.STORAGE
    (line,) = _said(capsys, "error: ")
    assert "checkpoints: the state of step 6 is lost ([Errno 27] File too large" in line
    assert "), the newest checkpoint there is step-00000002; free space" in line
    assert newest_checkpoint(Path(made.out) / "checkpoints").name == "step-00000002"
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: {made.out} trained to step 6, whose state is lost: this is step 2"
    assert _train(made.model_copy(update={"resume": "auto"})) == ExitStatus.OK  # from step 2
    capsys.readouterr()
    assert newest_checkpoint(Path(made.out) / "checkpoints").name == "step-00000006"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("background", [True, False])
def test_a_lock_file_that_is_removed_in_mid_run_costs_no_checkpoint(config, capsys, background):
    made = config(checkpoint_async=background)
    assert _train(made, {3: (Path(made.out) / LOCK).unlink}) == ExitStatus.OK
    assert _steps(made.out) == [6, 4, 2]
    (line,) = _said(capsys, "warning: ")
    assert line.endswith("run.lock was removed while the run was writing there; it is made and locked again")


@pytest.mark.usefixtures("limits")
def test_a_log_that_cannot_be_written_ends_no_run_and_keeps_whole_lines(config, capsys):
    made = config(checkpoint_interval=0, checkpoint_async=False)
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    log = Path(made.out) / "metrics.jsonl"

    def nearly_full():
        _limit_files(log.stat().st_size + 50)

    assert _train(made, {3: nearly_full, 5: lambda: _limit_files(soft)}) == ExitStatus.OK
    steps = [json.loads(line).get("step") for line in log.read_text().splitlines()]
    assert steps == [0, 1, 2, 5, 6, 6, 6, 6]  # start, steps, evaluation, checkpoint, end
    err = capsys.readouterr().err
    assert "cannot be written (File too large); the run continues without its log" in err
    assert "2 lines are missing" in err


def test_a_folder_that_is_removed_in_mid_run_is_told_of_at_each_save_and_at_the_end(config, capsys):
    made = config(checkpoint_async=False)
    assert _train(made, {3: lambda: shutil.rmtree(made.out)}) == ExitStatus.STORAGE
    said = _said(capsys, "")
    assert len([line for line in said if line.startswith("warning: step") and "was removed or renamed" in line]) == 2
    assert _is_lost(said[-2], made)
    assert said[-1].startswith(f"warning: {made.out}/summary.json cannot be written (")
    assert _steps(made.out) == _leftovers(made.out) == []


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("when", ["while the last save is written", "after it"])
def test_a_run_whose_folder_is_gone_in_the_end_has_kept_nothing_and_says_so(
    config, capsys, monkeypatch, when, world_size
):
    made = config(checkpoint_interval=4)
    begin, commit = store.begin, store.commit

    def removed_before(path):
        if path.name == "step-00000006":
            shutil.rmtree(made.out)
            Path(made.out).mkdir()
            raise OSError(5, "Input/output error")
        return begin(path)

    def removed_after(path):
        commit(path)
        if path.name == "step-00000006":
            shutil.rmtree(made.out)

    if when == "after it":
        monkeypatch.setattr(store, "commit", removed_after)
    else:
        monkeypatch.setattr(store, "begin", removed_before)
    assert _train(made, world_size=world_size) == ExitStatus.STORAGE
    (line,) = _said(capsys, "error: ")
    assert _is_lost(line, made)


def test_a_folder_that_another_run_took_meanwhile_is_left_alone(config, capsys):
    """A file system that grants one lock twice is played by a folder that was removed and made again."""
    made = config(checkpoint_async=False)
    taken = []

    def take():
        shutil.rmtree(made.out)
        Path(made.out).mkdir()
        taken.append(RunLock(Path(made.out)))

    assert _train(made, {3: take}) == ExitStatus.STORAGE
    said = capsys.readouterr().err.splitlines()
    warnings = [line for line in said if line.startswith("warning: step")]
    assert len(warnings) == 2
    assert all("now belongs to process" in line for line in warnings)
    assert _is_lost(said[-2], made)
    assert os.listdir(made.out) == [LOCK]  # the other run's
    taken[0].close()


def test_a_second_run_in_the_folder_is_refused_while_the_first_one_writes(config):
    made = config()
    run = build_run(made, LocalCommunicator(), CPU)
    with pytest.raises(UserError, match=rf"^out: .* is in use by process {os.getpid()} on .*; end that run first"):
        built(made.model_copy(update={"resume": "auto"}))
    program = f"from pathlib import Path; from zeroshard.train.state.lock import RunLock; RunLock(Path({made.out!r}))"
    ended = forked.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "is in use by process" in ended.stderr
    run.close()
    built(made.model_copy(update={"resume": "auto"}))


@pytest.mark.slow
def test_a_token_file_that_is_cut_off_while_it_is_read_is_blamed_by_the_launcher(config, tmp_path):
    text, data = tmp_path / "text.txt", tmp_path / "tokens"
    text.write_text("to be or not to be, that is the question\n" * 3000)
    command = [sys.executable, "-m", "zeroshard", "train", "--nproc", "2", "--max-steps", "100000"]
    command += f"""--data text --data.path {text} --data.dir {data} --model gpt2-demo --model.n_layer 1
        --model.n_embd 16 --model.n_head 2 --seq-len 16 --micro-batch-size 1 --eval-interval 0
        --out {tmp_path / "run"}""".split()
    metrics = tmp_path / "run" / "metrics.jsonl"
    with forked.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            deadline = time.monotonic() + 600
            while not (metrics.exists() and "step_s" in metrics.read_text()) and time.monotonic() < deadline:
                time.sleep(0.05)
            for path in data.glob("*/*.bin"):
                os.truncate(path, 0)
            err = run.communicate(timeout=600)[1]
        finally:
            run.kill()
    assert run.returncode == ExitStatus.PEER_LOST
    assert "Bus error" in err
    assert err.splitlines()[-1].startswith("error: rank ")
    assert "was ended by SIGBUS; a token file was cut off" in err.splitlines()[-1]
