"""The programs that measure run to their end without a GPU too; those of kernels say that they then measure nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import forked
from zeroshard.kernels.launch import INTERPRETED

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


def _run(*args):
    command = [sys.executable, *map(str, args)]
    done = forked.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_measures_each_mode_of_each_contestant(tmp_path):
    words = ("--operations", "rms_norm", "adamw", "--dtypes", "float32", "--json", tmp_path / "k.json")
    shown = _run("-m", "zeroshard", "bench", "kernels", *words)
    assert "toy sizes, no claims" in shown
    rows = json.loads((tmp_path / "k.json").read_text())["rows"]
    seen = {(row["operation"], row["mode"], row["contestant"]) for row in rows}
    modes = ("forward", "backward", "both")
    assert seen == {("rms_norm", mode, who) for mode in modes for who in ("eager", "triton")} | {
        ("adamw", "forward", who) for who in ("eager", "fused", "triton")
    }
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.soak  # its ranks are real starts, as it measures what a process holds
def test_footprint_measures_what_a_rank_holds(tmp_path):
    _run(
        BENCHMARKS / "claims" / "footprint.py",
        "--shape",
        "tiny",
        "--steps",
        "1",
        "--contestants",
        "ddp",
        "zero3@ring",
        "--json",
        tmp_path / "f",
    )
    rows = json.loads((tmp_path / "f").read_text())
    assert [row["name"] for row in rows] == ["ddp", "zero3@ring"]
    assert all(row["rss"] > 0 for row in rows)


@pytest.mark.soak  # a minute and more of the processor
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_sixty_four_ranks_of_one_host_take_a_quarter_of_a_gigabyte_each(tmp_path):
    _run(BENCHMARKS / "claims" / "many_ranks.py", "--json", tmp_path / "many.json")
    found = json.loads((tmp_path / "many.json").read_text())
    assert found["ranks_seen"] == 64
    assert found["largest_pss_bytes"] <= 250 * 2**20
