"""Run folders, whole and damaged, as facts."""

import fcntl
import json
import math
import os
from pathlib import Path

import pytest

from run_folders import LINK, write_run
from zeroshard.lab.report.entries import gather
from zeroshard.lab.run_folders import find_runs, read_run, spread
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import dump_toml
from zeroshard.train.start import run_training


@pytest.mark.redundant
def test_a_run_that_the_trainer_made_is_read_whole(tiny_config):
    config = tiny_config()
    run_training(config)
    run = read_run(config.out)
    assert (run.state, run.problems, run.link) == ("done", (), None)
    assert TrainConfig.model_validate(run.config) == config.model_copy(update={"compile": "off"})  # auto, on a CPU
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [evaluation.step for evaluation in run.evaluations] == [0, 3, 6]
    assert run.start["world_size"] == 1
    assert run.peak_bytes is None
    assert all(sum(step.memory_bytes.values()) > 0 for step in run.steps)
    assert run.steps[0].mfu is None
    assert run.setting("data.source") == "synthetic"
    assert run.setting("data.nothing.at.all", 7) == 7


def test_medians_leave_out_the_steps_that_warm_up(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.step_s == 0.1
    assert run.tokens_per_s == 640
    assert run.exposed_s == pytest.approx(0.03)
    assert sum(run.steps[-1].memory_bytes.values()) == 160
    short = read_run(write_run(tmp_path / "short", num_steps=1))
    assert short.step_s == 9.0


def test_speeds_of_local_steps_are_those_of_whole_rounds(tmp_path):
    folder, every = tmp_path / "run", 4
    folder.mkdir()
    replicas = TrainConfig(max_steps=40, warmup_steps=0, shard_size=1, local_steps={"every": every})
    (folder / "config.toml").write_text(dump_toml(replicas))
    lines = [{"event": "start", "step": 0, "world_size": 2}]
    for step in range(1, 41):
        step_s = 0.1 + (0.0 if step % every else 0.9)  # at each fourth step replicas take an outer step
        lines.append({"event": "step", "step": step, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "step_s": step_s})
        lines[-1] |= {"tokens": step, "tokens_per_s": 1 / step_s}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert len(run.rounds) == 9  # of 38 settled steps
    assert run.step_s == pytest.approx(0.1 + 0.9 / every)
    assert run.tokens_per_s == pytest.approx(1 / run.step_s)


def test_a_link_is_what_its_probe_measured(tmp_path):
    link = read_run(write_run(tmp_path / "run", link=LINK)).link
    assert (link.mode, link.achieved_bytes_per_s, link.comparable) == ("netns", 1e8, False)


def test_steps_taken_again_after_a_resume_count_once(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    again = [
        json.dumps({**json.loads(line), "loss": 1.0}) for line in lines if '"step": 4' in line and "step_s" in line
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, _resumed(lines[0], 3), *again]) + "\n")
    run = read_run(folder)
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert run.steps[-1].loss == 1.0


def test_steps_of_a_branch_that_was_left_count_no_more(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines, _resumed(lines[0], 2)]) + "\n")
    run = read_run(folder)
    assert [step.step for step in run.steps] == [1, 2]
    assert all(evaluation.step <= 2 for evaluation in run.evaluations)


def _resumed(start, step):
    return json.dumps({**json.loads(start), "step": step})


def _torn(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    (folder / "summary.json").unlink()


def _endless_numbers(folder):
    """Python reads 1e999 as infinity, which is no number of a step."""
    with (folder / "metrics.jsonl").open("a") as file:
        for event in ("start", "step", "eval"):
            file.write(f'{{"event": "{event}", "step": 1e999, "loss": 1.0}}\n')


def _no_numbers(folder):
    """Bytes that are a list, in each of the places that hold numbers by name."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for line, key in enumerate(("memory_bytes", "exposed_s"), start=1):
        lines[line] = json.dumps(json.loads(lines[line]) | {key: {"params": [1]}})
    path.write_text("\n".join(lines) + "\n")


def _broken_line(folder):
    text = (folder / "metrics.jsonl").read_text().splitlines()
    text[3] = text[3][:20]
    text[5] = "[]"
    (folder / "metrics.jsonl").write_text("\n".join(text) + "\n")


DAMAGES = {
    "killed": (lambda folder: (folder / "summary.json").unlink(), "unfinished", ()),
    "torn": (_torn, "unfinished", ("metrics.jsonl: the last line is half-written",)),
    "broken line": (_broken_line, "damaged", ("metrics.jsonl: line 4 and 1 more cannot be read",)),
    "a step of infinity": (_endless_numbers, "damaged", ("metrics.jsonl: line 13 and 2 more cannot be read",)),
    "a list for a number": (_no_numbers, "damaged", ("metrics.jsonl: line 2 and 1 more cannot be read",)),
    "binary log": (
        lambda folder: (folder / "metrics.jsonl").write_bytes(b"\xff\x00\n" * 3),
        "damaged",
        ("metrics.jsonl: line 1 and 2 more cannot be read",),
    ),
    "log is a folder": (
        lambda folder: ((folder / "metrics.jsonl").unlink(), (folder / "metrics.jsonl").mkdir()),
        "damaged",
        ("metrics.jsonl: cannot be read (Is a directory)",),
    ),
    "no log": (lambda folder: (folder / "metrics.jsonl").unlink(), "done", ()),
    "empty config": (
        lambda folder: (folder / "config.toml").write_text(""),
        "damaged",
        ("there is no config.toml: no run has begun here",),
    ),
    "half a config": (
        lambda folder: (folder / "config.toml").write_text("max_steps = "),
        "damaged",
        ("config.toml: does not parse (Invalid value (at end of document))",),
    ),
    "half a summary": (lambda folder: (folder / "summary.json").write_text('{"status": "o'), "damaged", None),
    "summary of another kind": (
        lambda folder: (folder / "summary.json").write_text("[1]"),
        "damaged",
        ("summary.json: is not an object",),
    ),
    "diverged": (lambda folder: (folder / "summary.json").write_text('{"status": "not_finite"}'), "failed", ()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_listed_and_breaks_nothing(tmp_path, damage):
    write_run(tmp_path / "good")
    folder = write_run(tmp_path / "bad")
    do, state, problems = DAMAGES[damage]
    do(folder)
    bad, good = map(read_run, find_runs(tmp_path))
    assert (good.state, good.problems) == ("done", ())
    assert bad.state == state
    if problems is not None:
        assert bad.problems == problems
    assert isinstance(bad.step_s, float)  # nan at worst


def test_a_folder_that_may_not_be_read_is_listed_and_told(tmp_path, monkeypatch):
    good, closed = write_run(tmp_path / "good"), write_run(tmp_path / "closed")

    def deny(name, is_denied):
        call = getattr(os, name)

        def checked(path, *args, **kwargs):
            if not isinstance(path, int) and is_denied(Path(os.fsdecode(path))):
                raise PermissionError(13, "Permission denied", os.fsdecode(path))
            return call(path, *args, **kwargs)

        monkeypatch.setattr(os, name, checked)

    # The tests may run as root, whom nothing is denied.
    deny("scandir", lambda path: path == closed)
    deny("stat", lambda path: closed in path.parents)
    deny("open", lambda path: closed in path.parents)
    assert find_runs(tmp_path) == [closed, good]
    run = read_run(closed)
    assert run.state == "damaged"
    told = tuple(
        f"{name}: cannot be read (Permission denied)" for name in ("config.toml", "metrics.jsonl", "summary.json")
    )
    assert run.problems == told
    for folder in (tmp_path, closed):
        (notice,) = gather([folder]).notices
        assert (notice.kind, notice.about) == ("folder", str(closed))
        assert notice.line == f"damaged: {'; '.join(told)}"


@pytest.mark.redundant
def test_every_prefix_of_a_log_can_be_read(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=3)
    whole = (folder / "metrics.jsonl").read_bytes()
    for length in range(0, len(whole), 7):
        (folder / "metrics.jsonl").write_bytes(whole[:length])
        run = read_run(folder)
        assert run.state == "done"
        assert len(run.steps) <= 3


def test_a_run_under_way_is_running_and_is_not_disturbed(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    with (folder / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
    assert read_run(folder).state == "unfinished"


def test_a_folder_that_is_not_there_is_no_error(tmp_path):
    run = read_run(tmp_path / "nothing")
    assert (run.state, run.steps) == ("damaged", ())
    assert run.problems == ("there is no config.toml: no run has begun here",)
    assert find_runs(tmp_path / "nothing") == []


def test_a_spread_is_median_low_and_high_of_what_is_finite():
    found = spread([3.0, 1.0, math.nan, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)
    assert spread([math.nan]) is None
