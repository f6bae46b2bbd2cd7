"""Checkpoints whose manifest somebody has changed, checksum and all, under every command that reads one.

Each ends well or in one line, imports nothing that the manifest names, and writes nowhere else (`fuzz_sandbox`).
"""

from __future__ import annotations

import random
import shutil

import pytest

from forged_manifests import CHECKPOINT, MORE, READERS, RESUMES, difference, forged, make_run, read_facts, write_facts
from fuzz_sandbox import run
from soak import examples

NUM_FORGED = examples(32, 1000)


@pytest.fixture(scope="module", params=["of every command", "with more to say"])
def made(request, tmp_path_factory):
    """A folder with a run, and the commands to try there."""
    if request.param == "of every command":
        return make_run(tmp_path_factory.mktemp("forged")), READERS
    return make_run(tmp_path_factory.mktemp("forged"), **MORE), RESUMES


@pytest.mark.slow
def test_a_forged_manifest_ends_in_a_line_or_means_what_can_be_used(made, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroshard.lab.report.png.draw", lambda figure, path: None)  # it starts programs to find fonts
    folder, commands = made
    rng, good = random.Random(0), read_facts(folder / "run" / CHECKPOINT)
    num_done = num_refused = 0
    while num_done < NUM_FORGED // 2:
        case = tmp_path / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(folder, case)
        shutil.copytree(folder / "run", case / "spare")
        (case / "trap.py").write_text("")
        facts = forged(good, rng)
        try:
            write_facts(case / "run" / CHECKPOINT, facts)
        except ValueError:
            continue  # JSON cannot hold it
        words = rng.choice(commands).split()
        outcome = run(words, case)
        told = [f"zeroshard {' '.join(words)}", *difference(good, facts)]
        assert not outcome.wrong, "\n".join([*told, *outcome.wrong])
        assert "\x1b" not in outcome.out + outcome.err
        num_done += 1
        num_refused += outcome.status != 0
    assert num_refused > num_done // 5
