from __future__ import annotations

import pytest

from zeroshard.lab.bench import memory
from zeroshard.lab.bench.settings import MemoryBench
from zeroshard.profiling.memory import POINTS

SHORT = {"seq_len": 16, "device": "cpu"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_point_is_as_the_formula_says_to_the_byte(dtype):
    report = memory.run(MemoryBench(models=("gpt2-demo",), nproc=3, rank=2, dtype=dtype, **SHORT))
    points = [row for row in report.rows if row["point"] in POINTS]
    assert len(points) == 4 * 3
    assert all(row["note"] == "" for row in points)
    assert all(row[c]["measured"] == row[c]["predicted"] for row in points for c in ("params", "grads", "all"))
    assert report.notes == ["MiB; 12 of 12 points as predicted, to the byte"]
    assert all("activations" in row["by_category"] for row in report.rows if row["point"] == "peak")


def test_a_difference_is_marked_in_the_table(monkeypatch):
    real = memory.predicted_points

    def wrong(*args):
        points = real(*args)
        points["after_step"] = {**points["after_step"], "grads": points["after_step"]["grads"] + (1 << 20)}
        return points

    monkeypatch.setattr(memory, "predicted_points", wrong)
    report = memory.run(MemoryBench(models=("gpt2-demo",), stages=(1,), **SHORT))
    assert report.notes == ["MiB; 2 of 3 points as predicted, to the byte"]
    line = next(line for line in report.text().splitlines() if "after_step" in line)
    assert line.endswith("differs")
    assert "3.21 (4.21)" in line
