"""Every example runs, and says what it is there to say."""

import sys
from pathlib import Path

import pytest

import forked

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(*args):
    command = [sys.executable, *args]
    return forked.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_stages_memory_measures_what_was_predicted():
    done = _run(EXAMPLES / "stages_memory.py", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(row[-2] == row[-1] for row in rows)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Every rank holds what was predicted, to the byte." in done.stdout


def test_sharded_optimizer_has_the_bits_of_the_unsharded_one():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = _run(*launcher, EXAMPLES / "sharded_optimizer.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    held = [[int(word.replace(",", "")) for word in line.split() if word[0].isdigit()] for line in lines[:-1]]
    whole = 2 * 4 * (2 * 64 * 256 + 256 + 64) + 4 * 4  # two states of each weight, and a step counter of each of four
    assert sorted(held) == [[0, held[0][1], whole], [1, whole - held[0][1], whole]]
    assert lines[-1] == "Weights and state have the bits of the unsharded run."


@pytest.mark.soak  # two ranks import transformers; tests/models/test_ulysses.py has its loop on threads
def test_long_sequences_have_the_losses_of_one_process():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = _run(*launcher, EXAMPLES / "long_sequences.py")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(rows) == 3
    assert all(abs(float(shared) - float(alone)) <= 2e-5 for _, _, _, shared, _, alone in rows)
