"""Rounds of machines: who is in the next one, and when one is over. No clock, no process: looks at a store."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from zeroshard.launch import elastic, many_hosts
from zeroshard.launch.many_hosts import ManyHosts
from zeroshard.launch.rendezvous_address import RendezvousAddress
from zeroshard.launch.rounds import (
    FIRST_CALL_LOOKS,
    MACHINE_CAME,
    MACHINE_SILENT,
    RANK_LOST,
    SILENT_LOOKS,
    Entry,
    Leader,
    RoundStore,
)


class Machines:
    """Machines at a store, and the leader among them, which is the first."""

    def __init__(self, least, most):
        self.board = RoundStore(dist.HashStore())
        self.entries = {}
        self.ports = iter(range(1, 100))
        self.add()
        self.leader = Leader(self.board, 0, least, most, lambda: ("here", next(self.ports)))

    def add(self, num_ranks=1):
        machine = self.board.new_machine()
        newest = self.board.round()
        self.entries[machine] = Entry(wants=1 if newest is None else newest.number + 1, num_ranks=num_ranks)
        self.board.post(machine, self.entries[machine])
        return machine

    def comes(self, *machines):
        """They have ended their ranks, and wait for the next round."""
        for machine in machines:
            self.entries[machine].wants = self.board.round().number + 1

    def look(self, times=1, silent=()):
        """Every machine but the silent ones posts, and the leader looks."""
        for _ in range(times):
            for machine, entry in self.entries.items():
                if machine not in silent:
                    entry.heartbeat += 1
                    self.board.post(machine, entry)
            self.leader.look()
        return self.board.round()


@pytest.fixture
def three():
    machines = Machines(1, 3)
    machines.add(num_ranks=2)
    machines.add()
    assert machines.look().machines == (0, 1, 2)
    return machines


def test_the_first_round_waits_for_the_most_machines_but_not_for_ever():
    machines = Machines(2, 3)
    assert machines.look(FIRST_CALL_LOOKS + 5) is None  # one is too few
    machines.add()
    assert machines.look(FIRST_CALL_LOOKS) is None
    assert machines.look().machines == (0, 1)


def test_ranks_follow_the_order_of_machines(three):
    newest = three.board.round()
    assert [newest.first_rank(machine) for machine in newest.machines] == [0, 1, 3]
    assert sum(newest.num_ranks) == 4


def test_a_round_is_over_once_a_machine_comes_anew_and_the_next_waits_for_those_that_live(three):
    three.comes(1)
    assert three.look().over == RANK_LOST
    three.comes(0)
    assert three.look(50).number == 1  # machine 2 still ends its ranks
    three.comes(2)
    newest = three.look()
    assert (newest.number, newest.machines, newest.over) == (2, (0, 1, 2), "")
    assert newest.port != 1  # where the first round met stands what it left


def test_a_silent_machine_ends_the_round_and_is_not_waited_for(three):
    assert three.look(SILENT_LOOKS - 1, silent=[2]).over == ""
    assert three.look(silent=[2]).over == MACHINE_SILENT
    three.comes(0, 1)
    assert three.look(silent=[2]).machines == (0, 1)


def test_a_machine_that_was_silent_and_goes_on_comes_again(three):
    three.look(SILENT_LOOKS, silent=[2])
    three.comes(0, 1)
    assert three.look(silent=[2]).number == 2
    assert three.look(5).over == ""  # it speaks again, of the first round
    three.comes(2)
    assert three.look().over == MACHINE_CAME
    three.comes(0, 1)
    assert three.look().machines == (0, 1, 2)


def test_a_leader_that_was_stopped_takes_nobody_for_silent(three):
    three.entries[1].heartbeat += 1000
    assert three.look().over == ""


def test_a_machine_that_comes_later_ends_the_round_where_there_is_room():
    machines = Machines(1, 2)
    assert machines.look(FIRST_CALL_LOOKS + 1).machines == (0,)
    machines.add()
    assert machines.look().over == MACHINE_CAME
    machines.comes(0)
    assert machines.look().machines == (0, 1)
    spare = machines.add()
    assert machines.look(50).over == ""  # full
    assert machines.look(SILENT_LOOKS, silent=[1]).over == MACHINE_SILENT
    machines.comes(0)
    assert machines.look(silent=[1]).machines == (0, spare)


def test_a_machine_that_leaves_in_good_order_ends_no_round(three):
    """Its ranks have told the others' why: these may still save, or upload."""
    three.entries[2].left = True
    assert three.look(SILENT_LOOKS + 5).over == ""


def test_too_few_machines_begin_no_round():
    machines = Machines(2, 2)
    machines.add()
    assert machines.look().number == 1
    machines.look(SILENT_LOOKS, silent=[1])
    machines.comes(0)
    assert machines.look(50, silent=[1]).over == MACHINE_SILENT
    machines.add()
    assert machines.look(silent=[1]).machines == (0, 2)


@pytest.fixture
def meet(monkeypatch):
    monkeypatch.setattr(many_hosts, "LOOK_S", 0.001)
    made = []

    def make(port, *, serves, most=2):
        made.append(ManyHosts(RendezvousAddress("127.0.0.1", port, 1, most, "127.0.0.1", serves=serves), 2, "test"))
        return made[-1]

    yield make
    for each in reversed(made):
        each.leave()


def _until_over(handler):
    while not handler.num_nodes_waiting():
        time.sleep(0.001)
    return handler.why_over()


def test_launchers_meet_lose_one_and_meet_anew(meet):
    first = meet(0, serves=True, most=1)
    alone = first.next_rendezvous()
    assert (alone.rank, alone.world_size, first.first_rank) == (0, 1, 0)
    assert first.num_nodes_waiting() == 0
    first._leader.most = 2
    second = meet(first._store.port, serves=False)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(second.next_rendezvous)
        assert _until_over(first) == MACHINE_CAME
        both = first.next_rendezvous(), later.result(600)
    assert [info.rank for info in both] == [0, 1]
    assert second.first_rank == 2
    assert both[0].bootstrap_store_info.master_port == both[1].bootstrap_store_info.master_port
    assert both[0].bootstrap_store_info.master_port != alone.bootstrap_store_info.master_port
    second._left.set()  # it is killed: its thread posts no more
    assert _until_over(first) == MACHINE_SILENT
    assert first.next_rendezvous().world_size == 1


def test_who_waits_hears_that_the_run_has_ended_or_that_nobody_comes(meet, monkeypatch):
    first = meet(0, serves=True)
    first._leader.least = 2
    monkeypatch.setattr(many_hosts, "JOIN_TIMEOUT_S", 0.05)
    with pytest.raises(RendezvousTimeoutError):
        first.next_rendezvous()
    first.set_closed()
    with pytest.raises(RendezvousClosedError):
        first.next_rendezvous()


@pytest.mark.parametrize(
    ("why", "ended"),
    [
        (MACHINE_CAME, [(signal.SIGTERM, elastic.SAVING_GRACE_S)]),  # replicas save at their next meeting
        (MACHINE_SILENT, [(signal.SIGKILL, 30)]),  # nobody can save any more
        (RANK_LOST, [(signal.SIGKILL, 30)]),
    ],
)
def test_ranks_may_save_where_a_machine_comes_and_end_at_once_where_one_is_lost(why, ended, monkeypatch, capsys):
    handler = object.__new__(ManyHosts)
    monkeypatch.setattr(ManyHosts, "why_over", lambda self: why)
    monkeypatch.setattr(elastic.LocalElasticAgent, "_restart_workers", lambda self, group: None)
    monkeypatch.setattr(elastic, "count_restart", lambda: None)
    agent, asked = object.__new__(elastic._Agent), []
    monkeypatch.setattr(agent, "_shutdown", lambda number=signal.SIGTERM, timeout=30: asked.append((number, timeout)))
    spec = SimpleNamespace(rdzv_handler=handler)
    agent._restart_workers(SimpleNamespace(state=WorkerState.HEALTHY, spec=spec))
    assert asked == ended
    assert capsys.readouterr().err == f"started again: {why}\n"
