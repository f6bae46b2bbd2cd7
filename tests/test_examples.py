"""Every example runs, and says what it is there to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(name, *args):
    command = [sys.executable, EXAMPLES / name, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_stages_memory_measures_what_was_predicted():
    done = _run("stages_memory.py", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(row[1::2] == row[2::2] for row in rows)
    assert "Every rank holds what was predicted." in done.stdout
