"""Sweep folders, whole and damaged, as facts."""

from __future__ import annotations

import json
from collections import Counter

from run_folders import LINK, write_run
from zeroshard import regular_files
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


def test_each_file_of_many_finished_cases_is_read_once(tmp_path, monkeypatch):
    first = write_run(run_folder(tmp_path, "c0", 0), num_steps=50)
    texts = {path.name: path.read_bytes() for path in first.iterdir()}
    for index in range(1, 50):
        folder = run_folder(tmp_path, f"c{index}", 0)
        folder.mkdir(parents=True)
        for name, content in texts.items():
            (folder / name).write_bytes(content)
    entries = [{"name": f"c{index}", "axes": {"seed": index}, "repeats": 1} for index in range(50)]
    (tmp_path / SWEEP).write_text(json.dumps({"format": SWEEP_FORMAT, "cases": entries}))
    opened, open_regular = Counter(), regular_files.open_regular

    def counted(path, *args, **kwargs):
        opened[path] += 1
        return open_regular(path, *args, **kwargs)

    monkeypatch.setattr(regular_files, "open_regular", counted)
    sweep = read_sweep(tmp_path)
    medians = [case.step_s.median for case in sweep.cases]
    assert sum(opened.values()) >= 50
    assert max(opened.values()) == 1
    assert medians == [0.1] * 50
