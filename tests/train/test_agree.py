import socket
import threading
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import LocalCommunicator, PeerError, RingCommunicator, run_threads
from zeroshard.errors import FirstRankStorageError, UserError
from zeroshard.launch.environment import World
from zeroshard.train.setup import agree, ranks
from zeroshard.train.setup.agree import agree_at, agree_on, code_version, first_rank_does, gather_bytes, start_facts
from zeroshard.train.setup.build import build_run


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


def test_a_rank_zero_that_works_for_long_is_not_taken_for_lost(monkeypatch):
    monkeypatch.setattr(agree, "STILL_AT_IT_S", 0.01)
    heard = threading.Semaphore(0)

    def rank_main(comm):
        if comm.rank == 0:
            first_rank_does(comm, lambda: [heard.acquire(timeout=600) for _ in range(3)])
            return
        all_reduce = comm.all_reduce

        def counted(*args, **kwargs):
            heard.release()
            return all_reduce(*args, **kwargs)

        comm.all_reduce = counted
        first_rank_does(comm, lambda: None)

    run_threads(rank_main, 2)


@pytest.mark.parametrize(("absent", "named"), [({2}, "rank 2 of 4"), ({1, 3}, "rank 1, 3 of 4"), ({0}, "rank 0 of 4")])
def test_ranks_that_do_not_come_are_named_by_all_that_did(monkeypatch, absent, named):
    monkeypatch.setattr(agree, "MEETING_S", 0.3)
    store, said = dist.HashStore(), []

    def rank_main(rank):
        with pytest.raises(PeerError, match=rf"^{named} did not join the rendezvous") as caught:
            agree_at(store, rank, 4, {"lr": 0.1})
        said.append(str(caught.value))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(4) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 4 - len(absent)


def test_a_rank_zero_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr(ranks, "MEETING_S", 0.2)
    with socket.socket() as probe, ExitStack() as stack:
        probe.bind(("127.0.0.1", 0))
        world = World(1, 1, 2, "127.0.0.1", probe.getsockname()[1])
        probe.close()
        with pytest.raises(PeerError, match=r"^rank 0 did not join the rendezvous at 127\.0\.0\.1:\d+ within 0\.2 s"):
            ranks.join(world, "shm", "zero2", torch.device("cpu"), stack)


def test_a_disk_that_fails_on_rank_zero_is_told_there_alone():
    def fail():
        raise OSError(28, "No space left on device")

    def rank_main(comm):
        with pytest.raises(OSError, match="No space left on device") as caught:
            first_rank_does(comm, fail)
        return type(caught.value)

    assert run_threads(rank_main, 3) == [OSError, FirstRankStorageError, FirstRankStorageError]


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


def _gathered(comm):
    mine = [b"", b"\0x", bytes(range(256)) * 1000][comm.rank % 3]
    ring = RingCommunicator()
    found = [gather_bytes(each, mine) for each in (comm, ring)]
    ring.close()
    return found[0] == found[1] and found[0]


def test_bytes_of_any_length_are_gathered_by_every_rank(gloo_ranks):
    wanted = [b"", b"\0x", bytes(range(256)) * 1000]
    assert gloo_ranks(3).run(_gathered) == [wanted] * 3
    assert run_threads(lambda comm: gather_bytes(comm, wanted[comm.rank]), 3) == [wanted] * 3
    assert run_threads(lambda comm: gather_bytes(comm, b""), 2) == [[b"", b""]] * 2
    assert gather_bytes(LocalCommunicator(), b"ab") == [b"ab"]
