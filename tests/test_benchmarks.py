"""The programs that measure run to their end without a GPU too; those of kernels say that they then measure nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from zeroshard.kernels.launch import INTERPRETED

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


def _run(*args, timeout=600):
    command = [sys.executable, *map(str, args)]
    done = forked.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_are_timed_in_each_mode_with_each_contestant():
    *rows, note = _run(BENCHMARKS / "gpu" / "kernel_times.py", "rms_norm").splitlines()
    assert "toy sizes, no claims" in note
    cells = [line.split() for line in rows[1:]]
    seen = {(words[0], *words[words.index("float32") + 1 :][:2]) for words in cells if "float32" in words}
    modes = ("forward", "backward", "both")
    assert seen == {("rms_norm", mode, who) for mode in modes for who in ("eager", "triton")}


@pytest.mark.soak  # its ranks are real starts
def test_collectives_are_timed_with_each_communicator(tmp_path):
    words = ("--worlds", 2, "--sizes", "1KiB", "--dtypes", "float32", "--comms", "torch", "ring", "--rounds", 2)
    shown = _run(BENCHMARKS / "claims" / "collectives.py", *words, "--json", tmp_path / "c.json")
    assert "busbw GB/s" in shown
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    seen = {(row["op"], row["comm"]) for row in rows}
    ops = ("reduce_scatter", "all_gather", "all_reduce")
    assert seen == {("copy", "copy"), *((op, comm) for op in ops for comm in ("torch", "ring"))}
    for row in rows:
        factor = {"copy": 0.0, "all_reduce": 1.0}.get(row["op"], 0.5)  # (W-1)/W, and twice that
        assert (row["busbw_bytes_per_s"] or 0.0) == row["algbw_bytes_per_s"] * factor > -1.0


@pytest.mark.slow
@pytest.mark.soak  # half an hour with all of them
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "package",
    [
        "torch",
        "transformers",
        "prodigyopt",
        "dadaptation",
        "schedulefree",
        "heavyball",
        "pytorch_optimizer",
        "bitsandbytes",
    ],
)
def test_optimizers_of_other_packages_train_and_resume_as_in_one_process_or_are_refused(package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    program = BENCHMARKS / "claims" / "foreign_optimizers.py"
    assert f"| {package} |" in _run(program, "--packages", package, timeout=7200)


@pytest.mark.soak  # its ranks are real starts, as it measures what a process holds
def test_footprint_measures_what_a_rank_holds(tmp_path):
    words = ("--shape", "tiny", "--steps", 1, "--contestants", "ddp", "zero3@ring", "--json", tmp_path / "f")
    _run(BENCHMARKS / "claims" / "footprint.py", *words)
    rows = json.loads((tmp_path / "f").read_text())
    assert [row["name"] for row in rows] == ["ddp", "zero3@ring"]
    assert all(row["rss"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.soak  # a minute and more of the processor
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_sixty_four_ranks_of_one_host_take_a_quarter_of_a_gigabyte_each(tmp_path):
    command = [sys.executable, BENCHMARKS / "claims" / "many_ranks.py", "--json", tmp_path / "many.json"]
    subprocess.run(command, check=True)  # a program that is forked starts ranks that are not its children
    found = json.loads((tmp_path / "many.json").read_text())
    assert found["ranks_seen"] == 64
    assert found["largest_pss_bytes"] <= 250 * 2**20
