"""Run folders, whole and damaged, as facts."""

from __future__ import annotations

import fcntl
import json
import math
import time
from pathlib import Path

import pytest

from zeroshard.lab.results import SWEEP, SWEEP_FORMAT, find_runs, read_run, read_runs, read_sweep, run_folder, spread
from zeroshard.train.config import TrainConfig, dump_toml
from zeroshard.train.loop import run_training

LINK = {
    "mode": "netns",
    "node_size": 1,
    "asked_bytes_per_s": 1.25e8,
    "achieved_bytes_per_s": 1e8,
    "asked_latency_s": 0.0,
    "achieved_latency_s": 2e-4,
    "probe_s": 1.0,
    "comparable": False,
    "why_not_comparable": "bandwidth: off",
}


def write_run(folder: Path, num_steps: int = 10, status: str = "ok", link: dict | None = None) -> Path:
    """A run folder as the trainer writes it."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(TrainConfig(max_steps=num_steps, warmup_steps=0)))
    lines = [{"event": "start", "step": 0, "world_size": 2, "tokens_per_step": 64, "link": link or {}}]
    for step in range(1, num_steps + 1):
        facts = {"loss": 5.0 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "step_s": 0.1 if step > 2 else 9.0, "mfu": None}
        lines.append({"event": "step", "step": step, "tokens": 64 * step, "tokens_per_s": 640.0, **facts})
        lines[-1] |= {"memory_bytes": {"params": 100, "grads": 50 + step}, "comm": {"all_reduce": 8}}
        lines[-1] |= {"exposed_s": {"grads/backward": 0.02, "control": 0.01}, "skipped": False}
    lines.append({"event": "eval", "step": num_steps, "loss": 4.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"status": status, "step": num_steps, "val_loss": 4.0}))
    return folder


def test_a_run_that_the_trainer_made_is_read_whole(tiny_config):
    config = tiny_config()
    run_training(config)
    run = read_run(config.out)
    assert (run.state, run.problems, run.link) == ("done", (), None)
    assert TrainConfig.model_validate(run.config) == config
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [evaluation.step for evaluation in run.evaluations] == [0, 3, 6]
    assert run.start["world_size"] == 1
    assert run.peak_bytes == max(sum(step.memory_bytes.values()) for step in run.steps) > 0
    assert math.isnan(run.steps[0].mfu)
    assert run.setting("data.source") == "synthetic"
    assert run.setting("data.nothing.at.all", 7) == 7


def test_medians_leave_out_the_steps_that_warm_up(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.step_s == 0.1
    assert run.tokens_per_s == 640
    assert run.exposed_s == pytest.approx(0.03)
    assert run.peak_bytes == 160
    short = read_run(write_run(tmp_path / "short", num_steps=1))
    assert short.step_s == 9.0


def test_a_link_is_what_was_asked_and_achieved(tmp_path):
    link = read_run(write_run(tmp_path / "run", link=LINK)).link
    assert (link.mode, link.achieved_bytes_per_s, link.comparable) == ("netns", 1e8, False)
    unlimited = read_run(write_run(tmp_path / "unlimited", link={**LINK, "asked_bytes_per_s": None})).link
    assert unlimited.asked_bytes_per_s == math.inf


def test_steps_taken_again_after_a_resume_count_once(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    again = [
        json.dumps({**json.loads(line), "loss": 1.0}) for line in lines if '"step": 4' in line and "step_s" in line
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, lines[0], *again]) + "\n")
    run = read_run(folder)
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert run.steps[-1].loss == 1.0


def _torn(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    (folder / "summary.json").unlink()


def _broken_line(folder):
    text = (folder / "metrics.jsonl").read_text().splitlines()
    text[3] = text[3][:20]
    text[5] = "[]"
    (folder / "metrics.jsonl").write_text("\n".join(text) + "\n")


DAMAGES = {
    "killed": (lambda folder: (folder / "summary.json").unlink(), "unfinished", ()),
    "torn": (_torn, "unfinished", ("metrics.jsonl: the last line is half-written",)),
    "broken line": (_broken_line, "damaged", ("metrics.jsonl: line 4 and 1 more cannot be read",)),
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
    "half a summary": (
        lambda folder: (folder / "summary.json").write_text('{"status": "o'),
        "damaged",
        None,
    ),
    "summary of another kind": (
        lambda folder: (folder / "summary.json").write_text("[1]"),
        "damaged",
        ("summary.json: is not an object",),
    ),
    "diverged": (
        lambda folder: (folder / "summary.json").write_text('{"status": "not_finite"}'),
        "failed",
        (),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_listed_and_breaks_nothing(tmp_path, damage):
    write_run(tmp_path / "good")
    folder = write_run(tmp_path / "bad")
    do, state, problems = DAMAGES[damage]
    do(folder)
    bad, good = read_runs(tmp_path)
    assert (good.state, good.problems) == ("done", ())
    assert bad.state == state
    if problems is not None:
        assert bad.problems == problems
    assert isinstance(bad.step_s, float)  # nan at worst
    assert isinstance(bad.peak_bytes, int)


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
    assert "no sweep has begun here" in read_sweep(tmp_path / "nothing").problems[0]


def test_a_spread_is_median_low_and_high_of_what_is_finite():
    found = spread([3.0, 1.0, math.nan, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)
    assert found.relative == 1.0
    assert spread([math.nan]) is None


def test_a_sweep_is_read_with_what_is_missing_or_damaged(tmp_path):
    entries = [{"name": f"c{i}", "axes": {"seed": i}, "repeats": 2} for i in range(3)]
    entries += [{"name": "../c0", "axes": {}, "repeats": 1}, {"axes": 3}]
    (tmp_path / SWEEP).write_text(json.dumps({"format": SWEEP_FORMAT, "cases": entries}))
    write_run(run_folder(tmp_path, "c0", 0), link=LINK)
    write_run(run_folder(tmp_path, "c0", 1))
    (write_run(run_folder(tmp_path, "c1", 0)) / "config.toml").write_text("=")
    (tmp_path / "cases" / "c1" / "1.failed.json").write_text('{"line": "status 1: error: x"}')
    sweep = read_sweep(tmp_path)
    assert sweep.problems == ("sweep.json: a case cannot be read",) * 2
    first, second, third = sweep.cases
    assert (len(first.done), first.step_s.count, first.why_not_comparable) == (2, 2, ("bandwidth: off",))
    assert ([run.state for run in second.runs], second.done, second.step_s) == (["damaged"], (), None)
    assert second.failures == ("status 1: error: x",)
    assert (third.runs, third.axes) == ((), {"seed": 2})


def test_a_thousand_finished_cases_are_read_in_seconds(tmp_path):
    first = write_run(run_folder(tmp_path, "c0", 0), num_steps=50)
    texts = {path.name: path.read_bytes() for path in first.iterdir()}
    for index in range(1, 1000):
        folder = run_folder(tmp_path, f"c{index}", 0)
        folder.mkdir(parents=True)
        for name, content in texts.items():
            (folder / name).write_bytes(content)
    entries = [{"name": f"c{index}", "axes": {"seed": index}, "repeats": 1} for index in range(1000)]
    (tmp_path / SWEEP).write_text(json.dumps({"format": SWEEP_FORMAT, "cases": entries}))
    start = time.process_time()
    sweep = read_sweep(tmp_path)
    medians = [case.step_s.median for case in sweep.cases]
    assert time.process_time() - start < 8
    assert medians == [0.1] * 1000
