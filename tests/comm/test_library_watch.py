"""In a loop of the user's own a rank that leaves a collective out is named, over every communicator."""

import os
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

import forked
from zeroshard.comm import LocalCommunicator, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.comm.wrappers.library_watch import watched
from zeroshard.host.finalizers import settle

PATIENCE_S = 300.0  # gloo would wait for 1800 s

# Two ranks train; rank 1 does what it was told to do. Where it says "other", it waits elsewhere than in a collective.
PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
import zeroshard
from zeroshard import ShardedOptimizer, Zero, comm
from zeroshard.comm.wrappers import library_watch

stage, fault, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
library_watch.GRACE_S = 2.0
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

model = Net()
if fault == "sharded optimizer":
    optim = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    zero = None
else:
    zero = Zero(model, stage=stage, comm=None if name == "None" else getattr(comm, name)())
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
try:
    for step in range(4):
        loss = model(torch.ones(2, 8)).square().mean()
        if step == 1 and fault == "skips a batch" and rank == 1:
            continue
        optim.zero_grad()
        loss.backward()
        if step == 1 and rank == 1:
            if fault == "dies":
                raise SystemExit(9)
            if fault == "sharded optimizer":
                optim.consolidate_state_dict(0)
        optim.step()
        with torch.no_grad():
            for _ in range(3 - rank if fault == "evaluates less" else 0):
                model(torch.ones(2, 8))
        if step == 1 and rank == 0 and fault == "saves on rank 0":
            zeroshard.save("/nobody/writes/there", zero, step=1)
    if fault == "other":
        if rank == 0:
            zero.state_dict()
        else:
            zero.comm.broadcast(torch.zeros(1), 0)
            time.sleep(3600)
    print("finished", flush=True)
except RuntimeError as error:
    print(type(error).__name__, error, flush=True)
    raise
"""


def _run(stage, fault, name="None"):
    """The exit codes of both ranks and what they printed."""
    world = forked.meeting_point(2) | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        forked.Popen(
            [sys.executable, "-c", PROGRAM, str(stage), fault, name],
            env={**os.environ, **world, "RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], printed


@pytest.mark.redundant
def test_ranks_that_do_alike_finish_and_exit_as_before():
    codes, printed = _run(3, "nothing")
    assert (codes, [text.strip() for text in printed]) == ([0, 0], ["finished"] * 2)


@pytest.mark.redundant(but=["evaluates less-RingCommunicator", "saves on rank 0-None"])
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("skips a batch", "None"),
        ("evaluates less", "RingCommunicator"),
        ("saves on rank 0", "SharedMemoryCommunicator"),
        ("saves on rank 0", "None"),
    ],
)
def test_a_rank_that_leaves_something_out_is_named_on_every_rank(fault, name):
    codes, printed = _run(3, fault, name)
    for code, text in zip(codes, printed, strict=True):
        assert code == 1, text  # an exception that nobody caught
        assert "PeerError" in text
        assert "ranks diverged at operation" in text or "called a different collective" in text
        assert "rank 1" in text or "rank 0" in text
        assert fault != "saves on rank 0" or ("rank 0 issued the call zeroshard.save, rank 1 issued all_" in text)


@pytest.mark.redundant
def test_a_rank_that_ends_is_named():
    codes, printed = _run(3, "dies")
    assert codes == [1, 9], printed
    assert "PeerError rank 1 is gone; " in printed[0]


def test_a_sharded_optimizer_is_watched_too():
    codes, printed = _run(0, "sharded optimizer")
    assert codes == [1, 1], printed
    assert all("ranks diverged at operation" in text for text in printed)


@pytest.mark.redundant
def test_a_process_that_cannot_raise_is_ended_and_says_where_it_was():
    codes, printed = _run(3, "other")
    assert codes == [1, 4], printed
    assert "PeerError ranks diverged" in printed[0]
    assert "error: rank 1: ranks diverged" in printed[1]
    assert "this rank is at <string>:" in printed[1]


def test_what_needs_no_watch_has_none():
    for comm in (LocalCommunicator(), NullCommunicator(4), ObservedCommunicator(NullCommunicator(4))):
        assert watched(comm) is comm
    assert run_threads(lambda comm: watched(comm) is comm, 2) == [True, True]


def test_ranks_that_do_not_exist_are_not_watched_among_processes_either(gloo_ranks):
    """Each process has such a world to itself, and waits for no other; `_has_no_peers` asserts it."""
    gloo_ranks(2).run(_has_no_peers)


def _has_no_peers(comm):
    alone = NullCommunicator(2, rank=comm.rank)
    assert watched(comm) is not comm
    assert watched(alone) is alone
    around = ObservedCommunicator(alone)
    assert watched(around) is around


def test_a_watch_ends_with_its_communicator(gloo_ranks):
    """`_watch_once` asserts it."""
    gloo_ranks(2).run(_watch_once)


def _watch_once(comm):
    before = set(threading.enumerate())

    def watching():  # threads of other tests' communicators may end meanwhile, and that of finalizers is everybody's
        return sorted(each.name for each in set(threading.enumerate()) - before if each.name != "zeroshard-finalizers")

    one = watched(comm)
    assert watched(ObservedCommunicator(one)).inner is one
    assert watching() == ["sentinel", "sentinel-board"]
    part = one.split([[0, 1]])
    del one
    assert watching() == ["sentinel", "sentinel-board"]
    part.barrier()
    del part
    settle()
    assert watching() == []
    assert dist.is_initialized()
