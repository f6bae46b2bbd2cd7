from __future__ import annotations

import pytest
import torch

from zeroshard.comm import NullCommunicator, run_threads
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
    assert ours["speedup"] == pytest.approx(3.0)  # the median of 2, 4 and 3
    assert ours["algbw_bytes_per_s"] == ours["busbw_bytes_per_s"] == 10_000
    assert copy["busbw_bytes_per_s"] is None
    assert copy["speedup"] is None


def test_every_communicator_is_asked_for_every_operation():
    def rank_main(comm):
        return sorted(contestants({"threads": comm}, 2, 64, torch.float32, torch.device("cpu")))

    assert run_threads(rank_main, 2) == [sorted(["copy", *(f"threads {op}" for op in OPS)])] * 2


def test_whole_tensors_lie_where_a_communicator_wants_them():
    class Choosy(NullCommunicator):
        def __init__(self):
            super().__init__(world_size=2)
            self.given = []

        def empty(self, numel, dtype):
            self.given.append(torch.empty(numel, dtype=dtype))
            return self.given[-1]

        def all_gather(self, output, shard):
            assert output is self.given[0]
            return super().all_gather(output, shard)

    comm = Choosy()
    contestants({"choosy": comm}, 2, 64, torch.float32, torch.device("cpu"))  # calls each once
    assert [len(tensor) for tensor in comm.given] == [16]
