"""The command line under words and files that nobody would write: one line, a status that is documented, no harm.

100 cases find what is broken often, the 5,000 of `make soak` the rest; `--fuzz-cases N` takes another number.
"""

from __future__ import annotations

import gc
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz_material import ReportContents, copied, make_material, spoil
from fuzz_sandbox import run
from fuzz_words import Line, command_lines
from zeroshard.launch.ending import Ending

ORDINARY, SOAK = 100, 5000  # cases


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> ReportContents:
    return make_material(tmp_path_factory.mktemp("fuzz") / "good")


@pytest.fixture
def nothing_lasts(monkeypatch):
    """Where a verb would train, measure, start processes or change this machine's network, it stops."""

    def started(*args: object, **kwargs: object) -> Ending:
        return Ending(0)

    def done(*args: object, **kwargs: object) -> int:
        return 0

    gc.collect()
    gc.freeze()  # a command that ends collects garbage: not that of all tests before this one
    monkeypatch.setattr("zeroshard.train.loop.loop.run_training", done)
    monkeypatch.setattr("zeroshard.launch.start_ranks.launch_workers", started)
    monkeypatch.setattr("zeroshard.launch.environment.end_with_starter", done)
    monkeypatch.setattr("zeroshard.lab.bench.command.run_bench", done)
    monkeypatch.setattr("zeroshard.lab.sweep.sweep.Runner.run", done)
    monkeypatch.setattr("zeroshard.lab.audit.optimizers.measure", done)
    monkeypatch.setattr("zeroshard.lab.audit.optimizers.table", lambda measured: "")
    monkeypatch.setattr("zeroshard.lab.report.png.draw", done)
    monkeypatch.setattr("zeroshard.submit.submit", lambda config, words: "queued")
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_lasts")
def test_no_words_and_no_files_end_in_a_traceback(request, material, tmp_path):
    soak = request.config.getoption("--soak", default=False)
    count = request.config.getoption("--fuzz-cases") or (SOAK if soak else ORDINARY)

    @settings(
        max_examples=count,
        derandomize=count <= ORDINARY,  # ordinary runs take the same cases each time
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=count > ORDINARY,
    )
    @given(command_lines())
    def holds(line):
        outcome = run(line.words, prepared(material, line, tmp_path / "case"))
        assert not outcome.wrong, "\n".join([f"zeroshard {line.words}", *outcome.wrong])

    holds()


def prepared(material: ReportContents, line: Line, folder: Path) -> Path:
    """``folder`` with copies of what the line's words lead to, spoiled as it says, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for each in sorted(material.folder.iterdir()):
        if any(each.name in word or word == "." for word in line.words):
            copied(each, folder)
    (folder / "trap.py").write_text("")
    rng = random.Random(line.seed)
    for name in line.spoiled:
        spoil(folder / name, rng)
    return folder
