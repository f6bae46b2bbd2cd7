import pytest
import torch

from zeroshard.comm import NullCommunicator
from zeroshard.host.errors import UserError
from zeroshard.lab.bench import step
from zeroshard.lab.bench.settings import StepBench


def test_ratios_are_taken_round_by_round():
    rounds = [{"plain": (1.0, 2.0), "zero1": (2.0, 2.0)}, {"plain": (4.0, 2.0), "zero1": (4.0, 6.0)}]
    plain, ours = step.rows_of(rounds, ["plain", "zero1"])
    assert plain["ratio"]["median"] == 1.0
    assert ours["ratio"]["median"] == 1.5
    assert ours["cpu_ratio"]["median"] == 2.0
    assert ours["rounds_wall_s"] == [2.0, 4.0]


@pytest.mark.parametrize(
    "name", ["zero4", "ddp@ring", "zero1@mpi", "fsdp", "ddp+reproducible", "zero1+", "zero2+roots", "ddp+offload"]
)
def test_an_unknown_contestant_is_refused(name):
    with pytest.raises(UserError, match=r"contestants: .* is unknown; write plain, ddp, zero2, zero2@ring, zero2@ring"):
        step.parse_contestant(name)


def test_a_contestant_is_a_kind_with_its_communicator():
    names = ("plain", "zero0", "zero3@shm", "zero2@shm+reproducible", "zero1+offload", "zero1+reproducible+offload")
    assert [step.parse_contestant(name) for name in names] == [
        ("plain", "", False, False),
        ("zero0", "", False, False),
        ("zero3", "shm", False, False),
        ("zero2", "shm", True, False),
        ("zero1", "", False, True),
        ("zero1", "", True, True),
    ]


def test_a_contestant_that_offloads_takes_the_same_steps():
    shape, ends = step.SHAPES["tiny"], []
    for name in ("zero1", "zero1+offload"):
        built = step.build(name, shape, {"": NullCommunicator(2)}, torch.device("cpu"))
        rows = step.batch(shape, 0, torch.device("cpu"))
        for _ in range(3):
            step.once(built, *rows)
        ends.append(built.forward(*rows).detach())
    assert torch.equal(*ends)


@pytest.mark.redundant
def test_one_rank_measures_in_this_process():
    report = step.run(StepBench(nproc=1, shapes=("tiny",), contestants=("plain", "zero2"), rounds=2, steps=1))
    assert [(row["shape"], row["name"]) for row in report.rows] == [("tiny", "plain"), ("tiny", "zero2")]
    assert all(row["wall_s"]["median"] > 0 and row["wall_s"]["num"] == 2 for row in report.rows)
    assert torch.get_num_threads() == 1
    assert "tiny" in report.text()
