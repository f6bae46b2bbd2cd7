"""Sweep folders, whole and damaged, as facts."""

from __future__ import annotations

import json

from run_folders import LINK, write_run
from zeroshard.lab.sweep.results import SWEEP, SWEEP_FORMAT, read_sweep, run_folder


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
    sweep = read_sweep(tmp_path)
    assert sweep.problems == ("sweep.json: a case cannot be read",) * 2
    first, second, third = sweep.cases
    assert (len(first.done), first.step_s.count, first.why_not_comparable) == (2, 2, ("bandwidth: off",))
    assert ([run.state for run in second.runs], second.done, second.step_s) == (["damaged"], (), None)
    assert second.failures == ("status 1: error: x",)
    assert (third.runs, third.axes) == ((), {"seed": 2})
