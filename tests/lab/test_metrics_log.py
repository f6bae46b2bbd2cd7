"""A log is read on from where it was read before, and gives at each moment what reading all of it would."""

from __future__ import annotations

import json
import os

import pytest

from run_folders import write_run
from zeroshard.lab import metrics_log
from zeroshard.lab.dashboard.watch import Watch
from zeroshard.lab.run_folders import read_run


@pytest.fixture
def taken(monkeypatch):
    """The lines that were parsed."""
    lines, take = [], metrics_log.MetricsLog._take

    def noted(log, line):
        lines.append(line)
        return take(log, line)

    monkeypatch.setattr(metrics_log.MetricsLog, "_take", noted)
    return lines


def _line(step, **changes):
    facts = dict.fromkeys(("loss", "grad_norm", "lr", "step_s", "tokens_per_s"), 1.0)
    return json.dumps({"event": "step", "step": step, "tokens": 64 * step, **facts, **changes}) + "\n"


def _append(path, text):
    with path.open("a") as file:
        file.write(text)


def _replace(path, text):
    other = path.with_suffix(".new")
    other.write_text(text)
    other.replace(path)


def test_only_what_was_appended_is_parsed(tmp_path, taken):
    folder = write_run(tmp_path / "run", num_steps=500)
    watch, log = Watch(tmp_path), folder / "metrics.jsonl"
    assert len(watch.runs()["run"].steps) == 500
    taken.clear()
    for step in (501, 502, 503):
        _append(log, _line(step))
        assert watch.runs()["run"].steps[-1].step == step
    assert len(taken) == 3
    watch.runs()
    assert len(taken) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda log: _append(log, _line(11)[:20]),
        lambda log: (_append(log, _line(11)[:20]), _append(log, _line(11)[20:])),
        lambda log: _append(log, "not a line\n" + _line(12)),
        lambda log: _append(log, json.dumps({"event": "start", "step": 4}) + "\n" + _line(5, loss=7.0)),
        lambda log: os.truncate(log, log.stat().st_size // 2),
        lambda log: os.truncate(log, 0),
        lambda log: log.write_text(_line(1, loss=3.0) * 100),
        lambda log: _replace(log, _line(1, loss=3.0)),
        lambda log: _replace(log, log.read_text() + _line(12)),
        lambda log: log.unlink(),
        lambda log: (log.unlink(), os.mkfifo(log)),
    ],
    ids=[
        *("half a line", "the other half", "a bad line", "a resumed run", "cut off", "emptied", "written anew"),
        *("replaced", "copied", "removed", "a pipe"),
    ],
)
def test_whatever_becomes_of_a_log_it_says_what_a_first_reading_does(tmp_path, change):
    folder = write_run(tmp_path / "run")
    watch, log = Watch(tmp_path), folder / "metrics.jsonl"
    watch.runs()
    _append(log, _line(11)[:20])  # half a line, as it may be met at any moment
    watch.runs()
    os.truncate(log, log.stat().st_size - 20)
    change(log)
    for _ in range(2):
        found, wanted = watch.runs()["run"], read_run(folder)
        for name in ("state", "start", "steps", "evaluations", "problems"):
            assert repr(getattr(found, name)) == repr(getattr(wanted, name)), name
        if log.is_file():
            _append(log, _line(20))
