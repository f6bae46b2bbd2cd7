"""A command's process hardly searches for garbage; a process that calls the command line keeps its own ways."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from zeroshard import cli


def test_whoever_calls_the_command_line_is_left_alone(capsys):
    before = gc.get_threshold(), gc.get_freeze_count()
    assert cli.main(["--version"]) == 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


@pytest.mark.soak  # a real start of Python and a run
def test_a_command_searches_seldom_and_not_at_its_end_and_its_training_as_ever_but_not_through_what_was_there(tmp_path):
    program = f"""
import gc, sys
from zeroshard import cli
from zeroshard.train.loop import saving
as_ever, seen, poll, dispatch = gc.get_threshold(), [], saving.Saving.poll, cli._dispatch
def noted(self):
    seen.append((gc.get_threshold() == as_ever, gc.get_freeze_count() > 100_000))
    poll(self)
def started(words):
    seen.append((gc.get_threshold()[0] > 100 * as_ever[0], gc.get_freeze_count()))
    return dispatch(words)
saving.Saving.poll, cli._dispatch = noted, started
sys.argv = ["zeroshard", "train", "--data", "synthetic", "--max-steps", "2", "--warmup-steps", "1", "--model.n_layer",
            "1", "--eval-interval", "0", "--out", {str(tmp_path / "run")!r}]
cli.main()
print(seen, gc.get_freeze_count() > 100_000)
"""
    out = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert out.splitlines()[-1] == "[(True, 0), (True, True), (True, True)] True"
