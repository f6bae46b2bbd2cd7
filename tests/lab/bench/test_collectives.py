from __future__ import annotations

import torch

from zeroshard.comm import run_threads
from zeroshard.lab.bench.collectives import OPS, bus_factor, contestants, rows_of


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_factor("all_reduce", 4) == 2 * 3 / 4
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 3 / 4
    assert bus_factor("copy", 4) == 0


def test_rates_and_speed_ups_come_from_the_rounds():
    rounds = {
        "torch all_reduce": [0.2, 0.4, 0.6],
        "shm all_reduce": [0.1, 0.1, 0.2],
        "copy": [0.01, 0.01, 0.01],
    }
    rows = rows_of({"size": "1kB", "dtype": "float32", "rounds_s": rounds}, 2, 1000, "torch")
    assert [(row["comm"], row["op"]) for row in rows] == [
        ("torch", "all_reduce"),
        ("shm", "all_reduce"),
        ("copy", "copy"),
    ]
    base, ours, copy = rows
    assert base["speedup"] == 1.0
    assert ours["speedup"] == 3.0  # the median of 2, 4 and 3
    assert ours["algbw_bytes_per_s"] == ours["busbw_bytes_per_s"] == 10_000
    assert copy["busbw_bytes_per_s"] is None
    assert copy["speedup"] is None


def test_every_communicator_is_asked_for_every_operation():
    def rank_main(comm):
        return sorted(contestants({"threads": comm}, None, 2, 64, torch.float32, torch.device("cpu")))

    assert run_threads(rank_main, 2) == [sorted(["copy", *(f"threads {op}" for op in OPS)])] * 2
