"""Sweeps of runs that take milliseconds: a stand-in writes the files that the trainer writes."""

import contextlib
import fcntl
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

import forked
from run_folders import LINK, write_run
from zeroshard.host.errors import UserError
from zeroshard.lab.run_folders import read_run
from zeroshard.lab.sweep.board import SweepProgress
from zeroshard.lab.sweep.cases import SweepConfig, make_case
from zeroshard.lab.sweep.results import SWEEP, SWEEP_FORMAT, read_sweep, run_folder
from zeroshard.lab.sweep.sweep import run_sweep
from zeroshard.settings.validate import validate

STAND_IN = """
import json, os, pathlib, sys, time, tomllib, uuid
from zeroshard.host.launch.environment import end_with_starter
end_with_starter()
text = open(sys.argv[2]).read()
config = tomllib.loads(text)
out = pathlib.Path(config["out"])
out.mkdir(parents=True)  # a folder that is there already is an error
(out / "config.toml").write_text(text)
(out / "checkpoints").mkdir()
log = (out / "metrics.jsonl").open("a", buffering=1)
print(json.dumps({"event": "start", "world_size": 2}), file=log)
if config["seed"] == 666 and not os.path.exists(sys.argv[2] + ".mended"):
    print("error: seed: 666 is not good; choose another", file=sys.stderr)
    sys.exit(2)
for step in range(1, 5):
    time.sleep(0.005)
    facts = dict(event="step", step=step, loss=1.0, grad_norm=1.0, lr=1.0, step_s=2.0, tokens=step, tokens_per_s=9.0)
    print(json.dumps(facts), file=log)
(out / "unfinished").write_text(json.dumps({"status": "ok", "token": uuid.uuid4().hex}))
(out / "unfinished").replace(out / "summary.json")
"""


@pytest.fixture
def stand_in(tmp_path):
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return [sys.executable, str(path)]


def sweep(tmp_path, **kwargs) -> SweepConfig:
    return validate(SweepConfig, {"out": str(tmp_path / "sweep"), **kwargs})


def tokens(folder: Path) -> dict[Path, str]:
    """What only the process knows that has finished a run."""
    found = folder.glob("cases/*/*/summary.json")
    return {path: json.loads(path.read_text())["token"] for path in found}


def said(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_case_that_is_to_fit_is_given_what_was_asked_and_no_default(tmp_path, stand_in):
    asked = {"seq_len": 32, "fit": "on", "seed": 3}
    config = sweep(tmp_path, base={key: asked[key] for key in ("seq_len", "fit")}, axes={"seed": [3]})
    assert run_sweep(config, command=stand_in, stream=io.StringIO()) == 0
    (settings,) = (tmp_path / "sweep").glob("cases/*/*.toml")
    given = tomllib.loads(settings.read_text())
    assert {key: given[key] for key in asked} == asked
    assert given.keys().isdisjoint({"strategy", "tiles", "model", "offload", "checkpoint_async"})  # levers may set them
    refused = make_case({**asked, "dry_run": True}, {})
    assert "a sweep runs its cases" in refused.refusal


def test_every_case_runs_as_often_as_asked_and_never_again(tmp_path, stand_in):
    config = sweep(tmp_path, repeats=2, base={"track": "trackio"}, axes={"seed": [1, 2]})
    stream = io.StringIO()
    assert run_sweep(config, command=stand_in, stream=stream) == 0
    tracks = [tomllib.loads(path.read_text())["track"] for path in (tmp_path / "sweep").glob("cases/*/*.toml")]
    assert sorted(track["name"] for track in tracks) == [f"seed {seed}  run {run}" for seed in (1, 2) for run in (1, 2)]
    assert {track["group"] for track in tracks} == {"sweep"}
    lines = said(stream)
    assert [line[:5] for line in lines[:4]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert [line.split("run ")[1][0] for line in lines[:4]] == ["1", "1", "2", "2"]  # interleaved
    assert lines[0].endswith(" left")
    assert "step 2,000.0 ms (2,000.0 to 2,000.0)" in lines[4]
    done = tokens(tmp_path / "sweep")
    assert len(done) == 4
    assert not list((tmp_path / "sweep").glob("cases/*/*/checkpoints"))
    more = sweep(tmp_path, repeats=2, base={"track": "trackio"}, axes={"seed": [2, 3]}, checkpoints=True)
    stream = io.StringIO()
    assert run_sweep(more, command=stand_in, stream=stream) == 0
    assert said(stream)[0].startswith("1 finished case is of an earlier sweep and not of this one; it stays in ")
    assert tokens(tmp_path / "sweep").items() > done.items()
    assert len(tokens(tmp_path / "sweep")) == 6
    assert len(list((tmp_path / "sweep").glob("cases/*/*/checkpoints"))) == 2


def test_nothing_outside_of_the_folder_is_written_or_deleted_through_a_link(tmp_path, stand_in):
    config, outside, folder = sweep(tmp_path, axes={"seed": [1]}), tmp_path / "outside", tmp_path / "sweep"
    run_sweep(config, command=stand_in, stream=io.StringIO())
    (case,) = (folder / "cases").iterdir()
    outside.mkdir()
    (outside / "file").write_text("precious")
    shutil.rmtree(case / "0")
    for name, place in (("0", outside), ("0.toml", outside / "file"), ("0.log", outside / "file")):
        (case / name).unlink(missing_ok=True)
        (case / name).symlink_to(place)
    with pytest.raises(OSError, match=r"it is a symbolic link: .*0\.log"):
        run_sweep(config, command=stand_in, stream=io.StringIO())
    (case / "0.log").unlink()
    assert run_sweep(config, command=stand_in, stream=io.StringIO()) == 0
    assert sorted(path.name for path in case.iterdir() if not path.is_symlink()) == ["0", "0.log", "0.toml"]
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("file", "precious")]


def test_a_case_that_fails_stops_no_other_and_runs_again_when_asked(tmp_path, stand_in):
    config = sweep(tmp_path, axes={"seed": [1, 666, "x", 2]})
    stream = io.StringIO()
    assert run_sweep(config, command=stand_in, stream=stream) == 1
    told = stream.getvalue()
    assert "refused: seed: 'x' is not a whole number" in told
    assert "failed: status 2: error: seed: 666 is not good; choose another" in told
    before = tokens(tmp_path / "sweep")
    assert len(before) == 2
    by_seed = {case.axes["seed"]: case for case in read_sweep(tmp_path / "sweep").cases}
    assert by_seed[666].failures == ("status 2: error: seed: 666 is not good; choose another",)
    (settings,) = (tmp_path / "sweep").glob(f"cases/{by_seed[666].name}/0.toml")
    settings.with_name("0.toml.mended").touch()
    assert run_sweep(config, command=stand_in, stream=io.StringIO()) == 1  # not asked
    assert tokens(tmp_path / "sweep") == before
    again = config.model_copy(update={"retry": True, "axes": {"seed": [1, 666, 2]}})
    assert run_sweep(again, command=stand_in, stream=io.StringIO()) == 0
    assert tokens(tmp_path / "sweep").items() > before.items()
    log = (tmp_path / "sweep" / "cases" / by_seed[666].name / "0.log").read_text()
    assert log.count("# 20") == 2  # both attempts
    assert "error: seed: 666" in log


@pytest.mark.redundant
def test_a_sweep_killed_at_random_moments_loses_nothing_and_runs_nothing_twice(tmp_path, stand_in):
    config = sweep(tmp_path, repeats=2, axes={"seed": [1, 2, 3, 4]})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    code = (
        "from zeroshard.lab.sweep.cases import SweepConfig; from zeroshard.lab.sweep.sweep import run_sweep\n"
        f"config = SweepConfig.model_validate_json(open({str(tmp_path / 'config.json')!r}).read())\n"
        f"raise SystemExit(run_sweep(config, command={stand_in!r}))"
    )
    rng, done, num_kills = random.Random(0), {}, 0
    while True:
        process = forked.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        wait_s = rng.uniform(0.2, 0.8)
        if num_kills == 3:
            wait_s = 60
        try:
            assert process.wait(wait_s) == 0
            process.communicate()
        except subprocess.TimeoutExpired:
            children = []
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since, by itself
                children = psutil.Process(process.pid).children()
                process.send_signal(signal.SIGKILL)
                num_kills += 1
            process.communicate()
            assert forked.still_running(children) == []  # a run dies with its sweep
        found = tokens(tmp_path / "sweep")
        assert found.items() >= done.items()  # what had ended well did not run again
        done = found
        if process.returncode == 0:
            break
    assert num_kills
    assert len(done) == 8
    result = read_sweep(tmp_path / "sweep")
    assert result.problems == ()
    assert [len(case.done) for case in result.cases] == [2, 2, 2, 2]
    assert not any(case.failures for case in result.cases)


def test_one_process_runs_a_sweep_and_not_in_the_folder_of_a_run(tmp_path, stand_in):
    config, folder = sweep(tmp_path, axes={"seed": [1]}), tmp_path / "sweep"
    folder.mkdir()
    with (folder / "sweep.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="out: another process is running"):
            run_sweep(config, command=stand_in, stream=io.StringIO())
    (folder / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"^out: .*sweep holds a run; choose another folder"):
        run_sweep(config, command=stand_in, stream=io.StringIO())


def test_a_dry_run_says_what_would_run(tmp_path, stand_in):
    stream = io.StringIO()
    config = sweep(tmp_path, axes={"seed": [1, 2]}, dry_run=True)
    assert run_sweep(config, command=stand_in, stream=stream) == 0
    assert [line.split("  ")[1] for line in said(stream)] == ["seed 1", "seed 2"]
    assert not (tmp_path / "sweep" / "cases").exists()


def test_each_run_has_a_line_with_what_cannot_be_compared_and_the_time_that_is_left(tmp_path, capsys):
    good, bad = make_case({}, {"seed": 1}), make_case({}, {"seed": 2})
    board = SweepProgress(sys.stdout)
    board.num_all = 3
    board.begins(good, 0)
    board.ended(good, 0, read_run(write_run(tmp_path / "run", link=LINK)), seconds=1.25)
    board.ended(bad, 0, read_run(tmp_path / "none"), seconds=6.75, failure="status 1: no")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        f"[1/3] {good.name[:6]}  seed 1  run 1  done in 1.2 s  step 100.0 ms  640 tok/s  exposed 30%"
    )
    assert first.endswith("not comparable: bandwidth: off  2 s left")
    assert second == f"[2/3] {bad.name[:6]}  seed 2  run 1  failed: status 1: no  4 s left"


def test_a_folder_that_is_not_there_is_no_error(tmp_path):
    assert "no sweep has begun here" in read_sweep(tmp_path / "nothing").problems[0]


def test_a_sweep_is_read_with_what_is_missing_or_damaged(tmp_path):
    entries = [{"name": f"c{i}", "axes": {"seed": i}, "repeats": 2} for i in range(3)]
    entries += [{"name": "../c0", "axes": {}, "repeats": 1}, {"axes": 3}]
    (tmp_path / SWEEP).write_text(json.dumps({"format": SWEEP_FORMAT, "cases": entries}))
    write_run(run_folder(tmp_path, "c0", 0), link=LINK)
    write_run(run_folder(tmp_path, "c0", 1))
    (write_run(run_folder(tmp_path, "c1", 0)) / "config.toml").write_text("=")
    (tmp_path / "cases" / "c1" / "1.failed.json").write_text('{"line": "status 1: error: x"}')
    found = read_sweep(tmp_path)
    assert found.problems == ("sweep.json: a case cannot be read",) * 2
    first, second, third = found.cases
    assert (len(first.done), first.step_s.count, first.why_not_comparable) == (2, 2, ("bandwidth: off",))
    assert ([run.state for run in second.runs], second.done, second.step_s) == (["damaged"], (), None)
    assert second.failures == ("status 1: error: x",)
    assert (third.runs, third.axes) == ((), {"seed": 2})
