"""What the dashboard shows of runs: curves over other axes, the page of one run, differences, sweeps, and many runs."""

from __future__ import annotations

import json
import os

import pytest

from run_folders import write_run, write_sweep

pytest.importorskip("dash", reason="the extra `dashboard` is not installed")

from zeroshard.lab.dashboard import all_runs_page, planner, run_page, run_table, step_curves
from zeroshard.lab.dashboard.watch import Watch
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.run_folders import read_run
from zeroshard.train.config.validate import validate


@pytest.fixture
def run(tmp_path):
    return read_run(write_run(tmp_path / "run"))


@pytest.mark.parametrize(("x", "first", "last"), [("step", 2, 10), ("tokens", 128, 640), ("time", 18 / 60, 18.8 / 60)])
def test_curves_are_over_steps_tokens_or_time(run, x, first, last):
    (line, _) = step_curves.curve("loss", {"run": run}, step_curves.View(x=x)).series
    assert (line.x[0], line.x[-1]) == pytest.approx((first, last))
    assert (line.y[0], line.y[-1]) == (4.8, 4.0)


def test_validation_losses_stand_where_their_step_does(run):
    points = step_curves.curve("loss", {"run": run}, step_curves.View(x="tokens")).series[1]
    assert (points.x, points.y) == ((640.0,), (4.0,))


def test_a_smoothed_curve_is_the_corrected_moving_average():
    assert step_curves.smoothed([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0, 3.0, 3.0])
    assert step_curves.smoothed([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.25 + 1.0) / 0.75])
    assert step_curves.smoothed([1.0, 2.0], 0.0) == [1.0, 2.0]


def test_the_scale_is_logarithmic_where_all_values_are_positive(run):
    assert step_curves.curve("lr", {"run": run}, step_curves.View(scale="log")).y.log
    figure = step_curves.curve("loss", {}, step_curves.View(scale="log"))
    assert (figure.y.log, figure.x.title) == (False, "not measured in these runs")


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 1e-3), ("grad-norm", 1.0), ("exposed", 30.0), ("tokens", 640.0), ("held", 160 / 2**20)]
)
def test_each_quantity_of_a_step_has_its_curve(run, name, value):
    (line,) = step_curves.curve(name, {"run": run}, step_curves.AS_WRITTEN).series
    assert line.y[-1] == pytest.approx(value)


def test_what_no_control_offers_is_the_first_choice():
    assert all_runs_page.view_of("furlongs", 7, None) == step_curves.AS_WRITTEN
    assert all_runs_page.view_of("time", "0.9", "log") == step_curves.View("time", "0.9", "log")


def test_the_page_of_a_run_has_its_settings_checkpoints_and_stacks(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as log:
        saved = {"event": "checkpoint", "step": 5, "path": "x/step-00000005", "bytes": 2048, "seconds": 0.25}
        failed = {"event": "checkpoint", "step": 9, "path": "x/step-00000009", "error": "No space left on device"}
        log.write(json.dumps(saved) + "\n" + json.dumps(failed) + "\n")
    (folder / "stacks").mkdir()
    (folder / "stacks" / "rank-00000.txt").write_text("in all_reduce")
    os.mkfifo(folder / "stacks" / "rank-00001.txt")
    (folder / "stacks" / "rank-00002.txt").symlink_to("/etc/hostname")
    text = str(run_page.details("run", read_run(folder), []))
    for words in ("max_steps", "step-00000005", "0.25", "No space left on device", "in all_reduce", "a named pipe"):
        assert words in text
    assert "rank-00002.txt" not in text


def test_each_validation_set_has_a_mark_of_its_own_and_a_row_on_the_page_of_its_run(tmp_path):
    read = read_run(write_run(tmp_path / "run", named={"maths": 1.5, "code": 2.5}))
    own, *further = [
        line for line in step_curves.lines("loss", "run", read, 0, step_curves.AS_WRITTEN) if line.mark == "points"
    ]
    assert (own.name, own.marker, own.y) == ("", "diamond", (4.0,))
    assert [(line.name, line.y) for line in further] == [
        ("run, val_loss/maths", (1.5,)),
        ("run, val_loss/code", (2.5,)),
    ]
    assert len({own.marker, *(line.marker for line in further)}) == 3
    text = str(run_page.details("run", read, []))
    for words in ("val_loss/maths", "1.5000 (step 10)", "val_loss/code", "2.5000 (step 10)"):
        assert words in text


def test_a_run_without_stacks_and_checkpoints_says_so(run):
    text = str(run_page.details("run", run, []))
    assert "No step has hung." in text
    assert "None was saved." in text


def test_differences_are_the_settings_that_differ(tmp_path):
    runs = {name: read_run(write_run(tmp_path / name, num_steps=steps)) for name, steps in (("a", 4), ("b", 6))}
    head, body = run_page.differences(runs)
    assert [cell.children for cell in head.children.children] == ["setting", "a", "b"]
    assert [[cell.children for cell in row.children] for row in body.children] == [["max_steps", "4", "6"]]
    assert "have the same settings" in str(run_page.differences({"a": runs["a"]}))


def test_runs_are_grouped_by_their_sweep(tmp_path):
    write_run(tmp_path / "alone")
    write_sweep(tmp_path / "deep" / "study", bandwidths=("1Gbit/s",))
    found = Watch(tmp_path).runs()
    called = run_table.labels({name: seen.run for name, seen in found.items()})
    bodies = run_table.part_of_table(found, called).whole()[1:]
    groups = {body.children[0].children.children: len(body.children) - 1 for body in bodies}
    assert groups == {"single runs": 1, "sweep deep/study: 4 runs": 4}


def test_many_runs_are_read_over_several_calls_the_newest_first(tmp_path):
    for index, name in enumerate("abc"):
        os.utime(write_run(tmp_path / name) / "metrics.jsonl", (index, index))
    watch = Watch(tmp_path, clock=iter(range(100)).__next__)
    seen = []
    for _ in range(3):
        found = watch.runs(budget_s=1)  # the clock is past it after one run
        seen.append((list(found), watch.num_unread))
    assert seen == [(["c"], 2), (["b", "c"], 1), (["a", "b", "c"], 0)]
    assert "1 more are being read" in run_table.summary({name: seen.run for name, seen in found.items()}, "x", 1)


def _texts(part):
    """Every text of ``part``, in order."""
    inside = getattr(part, "children", part)
    if isinstance(inside, list | tuple):
        return [text for each in inside for text in _texts(each)]
    return [inside] if isinstance(inside, str) else [] if inside is None else _texts(inside)


PLANNED = {"model": "gpt2-demo", "gpus": 8, "stage": "3", "micro_batch": 1, "seq_len": 64}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu": "h100-80gb"}, ("fitted to published runs", "PyTorch's default", "four of five peaks lay")),
        ({"gpu": "l40s-48gb"}, ("no published run on such a device", "to which nothing was fitted")),
        ({"gpu": "a100-80gb", "tensor_parallel": 2}, ("On top, plan only: tensor_parallel",)),
    ],
)
def test_the_planner_tells_under_its_answer_where_each_number_comes_from(given, words):
    *_, part = planner.answer({**PLANNED, **given})
    told = _texts(part)
    asked = {**PLANNED, **given, "model": {"name": PLANNED["model"]}, "explain": True}
    explained = answer_plan(validate(PlanConfig, asked)).text
    assert type(part).__name__ == "Details"
    assert not getattr(part, "open", False)
    assert [text for text in told if text not in explained] == [told[0], "Time", "Memory", "Traffic"]
    assert "stage 3, micro-batch 1" in told[0]
    assert [word for word in words if not any(word in text for text in told)] == []


def test_where_nothing_fits_the_sources_are_of_the_row_that_needs_the_least_memory():
    *_, part = planner.answer({**PLANNED, "stage": "all", "micro_batch": 2**20})
    assert "stage 3, micro-batch 1048576" in _texts(part)[0]
