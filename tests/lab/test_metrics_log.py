"""A log is read on from where it was read before, and gives at each moment what reading all of it would."""

from __future__ import annotations

import json
import os

import pytest

from run_folders import write_run
from zeroshard.lab import metrics_log
from zeroshard.lab.dashboard.watch import Watch
from zeroshard.lab.log_ends import KEPT_STEPS, LogEnds
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
    found = watch.runs()
    assert found["run"].run.steps[-1].step == 500
    assert 0 < len(taken) < 100  # a list needs the last steps alone
    assert len(watch.whole(found)["run"].run.steps) == 500
    taken.clear()
    for step in (501, 502, 503):
        _append(log, _line(step))
        found = watch.runs()
        assert found["run"].run.steps[-1].step == watch.whole(found)["run"].run.steps[-1].step == step
    assert len(taken) == 2 * 3  # by the list, and by what shows it whole
    watch.whole(watch.runs())
    assert len(taken) == 2 * 3


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
    watch.whole(watch.runs())
    _append(log, _line(11)[:20])  # half a line, as it may be met at any moment
    watch.whole(watch.runs())
    os.truncate(log, log.stat().st_size - 20)
    change(log)
    for _ in range(2):
        found, wanted = watch.runs(), read_run(folder)
        whole, listed = watch.whole(found)["run"].run, found["run"].run
        for name in ("state", "start", "steps", "evaluations", "problems"):
            assert repr(getattr(whole, name)) == repr(getattr(wanted, name)), name
        for name in ("state", "start", "problems"):
            assert repr(getattr(listed, name)) == repr(getattr(wanted, name)), name
        assert repr(listed.steps[-1:]) == repr(wanted.steps[-1:])
        if log.is_file():
            _append(log, _line(20))


_START = json.dumps({"event": "start", "step": 0, "world_size": 4}) + "\n"


def _both(path, text):
    """A log of ``text``, whole and its ends, each read at once and in two parts."""
    logs = []
    for log in (metrics_log.MetricsLog(path), LogEnds(path), LogEnds(path)):
        if len(logs) == 2:
            path.write_text(text[: len(text) // 2])
            log.read()
        path.write_text(text)
        log.read()
        logs.append(log)
    return logs


@pytest.mark.parametrize("length", [0, 1, 30, 3000])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines,
        lambda lines: [*lines[: len(lines) // 2], _line(7)[:40], *lines[len(lines) // 2 :]],
        lambda lines: [*lines[: len(lines) // 2], "\0" * 30, *lines[len(lines) // 2 :]],
        lambda lines: [*lines[: len(lines) // 2], "\n", *lines[len(lines) // 2 :]],
        lambda lines: [*lines, json.dumps({"event": "start", "step": 5, "world_size": 2}) + "\n", _line(6)],
        lambda lines: [json.dumps(json.loads(line), separators=(",", ":")) + "\n" for line in lines],
        lambda lines: [*lines, _line(3)[:-5]],
    ],
    ids=["whole", "ran into another", "zeros", "an empty line", "resumed", "by another writer", "half-written"],
)
def test_the_ends_of_a_log_are_those_of_the_whole(tmp_path, length, spoil):
    text = "".join(spoil([_START, *(_line(step) for step in range(1, length + 1))]))
    whole, *ends = _both(tmp_path / "metrics.jsonl", text)
    for log in ends:
        assert (log.start, log.problem, log.torn) == (whole.start, whole.problem, whole.torn)
        assert repr(sorted(log.steps.items())[-1:]) == repr(sorted(whole.steps.items())[-1:])
        assert len(log.steps) <= 100 or log.problem


def test_what_an_overview_keeps_of_a_run_does_not_grow_with_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(_START)
    log = LogEnds(path)
    for step in range(1, 1001):
        _append(path, _line(step))
        log.read()
    assert list(log.steps)[-1] == 1000
    assert len(log.steps) <= 2 * KEPT_STEPS
