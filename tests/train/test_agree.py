import threading

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.errors import UserError
from zeroshard.train.agree import agree_at, agree_on, code_version, first_rank_does, start_facts
from zeroshard.train.build import build_run


def test_only_the_first_rank_works_and_the_others_wait_for_it():
    done = threading.Event()
    workers = []

    def rank_main(comm):
        def work():
            workers.append(comm.rank)
            done.set()

        first_rank_does(comm, work)
        return done.is_set()

    assert run_threads(rank_main, 3) == [True] * 3
    assert workers == [0]


def test_a_users_mistake_is_the_same_error_on_every_rank():
    def fail():
        raise UserError("data.path", "'ä.txt' is not there", "give another")

    def rank_main(comm):
        with pytest.raises(UserError) as caught:
            first_rank_does(comm, fail)
        return str(caught.value)

    assert set(run_threads(rank_main, 3)) == {"data.path: 'ä.txt' is not there; give another"}


def test_any_other_failure_leaves_no_rank_waiting():
    def rank_main(comm):
        with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
            first_rank_does(comm, lambda: 1 / 0)

    run_threads(rank_main, 2)
    with pytest.raises(ZeroDivisionError):
        first_rank_does(LocalCommunicator(), lambda: 1 / 0)


def test_ranks_with_the_same_facts_agree():
    run_threads(lambda comm: agree_on(comm, {"lr": 0.1, "data": None}), 3)
    agree_on(LocalCommunicator(), {"lr": 0.1})


@pytest.mark.parametrize(
    ("rank", "field", "value", "line"),
    [
        (2, "lr", 0.2, "lr: rank 2 has 0.2, rank 0 has 0.1; start every rank with the same settings"),
        (1, "code version", "2", "code version: rank 1 has '2', rank 0 has '1'; start every rank with the same code"),
        (0, "data", "b", "data: rank 1 has 'a', rank 0 has 'b'; start every rank with the same data"),
        (1, "more", 1, "more: rank 1 has 1, rank 0 has 'nothing'; start every rank with the same settings"),
    ],
)
@pytest.mark.parametrize("way", ["comm", "store"])
def test_the_first_rank_and_field_that_differ_are_named_on_every_rank(rank, field, value, line, way):
    store = dist.HashStore()

    def rank_main(comm):
        facts = {"seed": 1, "lr": 0.1, "code version": "1", "data": "a"}
        facts |= {field: value} if comm.rank == rank else {}
        with pytest.raises(UserError) as caught:
            agree_on(comm, facts) if way == "comm" else agree_at(store, comm.rank, 3, facts)
        return str(caught.value)

    for said in run_threads(rank_main, 3):
        assert said.startswith(line)


def test_ranks_that_agree_at_a_store_go_on():
    store = dist.HashStore()
    run_threads(lambda comm: agree_at(store, comm.rank, 3, {"lr": 0.1}), 3)


def test_what_may_differ_between_machines_is_no_fact():
    facts = start_facts({"lr": 0.1, "port": 3, "nproc": 2, "data": {"dir": "/a", "source": "text"}})
    assert facts.keys() == {"lr", "data.source", "code version", "torch version"}
    assert facts["code version"] == code_version()


def test_another_model_or_other_data_is_refused_by_name(tiny_config):
    def rank_main(comm):
        layers = 2 + (comm.rank == 1)
        config = tiny_config(model={"name": "gpt2-demo", "n_layer": layers, "n_embd": 16, "n_head": 2})
        with pytest.raises(UserError) as caught:
            build_run(config, comm, torch.device("cpu"))
        return str(caught.value)

    said = run_threads(rank_main, 2)
    assert said[0] == said[1]
    assert said[0].startswith("model blocks.2.")
    assert "rank 1 has 'torch.float32 [16]" in said[0]
    assert "rank 0 has 'nothing'; start every rank with the same model" in said[0]
