"""Memory that ranks share: nothing of it stays, it joins one host alone, and sums run in the order of ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from zeroshard.comm import PeerError, SharedMemoryCommunicator, mapped, ranks_share_host, run_threads, shm
from zeroshard.errors import UserError


def _ours(marked_by):
    """Files of shared memory made in this process after ``marked_by``; other tests make some at the same time."""
    mapped._PREFIX = f"zeroshard-shm-{marked_by}-"
    return sorted(path.name for path in mapped.folder().glob(f"{mapped._PREFIX}*"))


def _files_while_it_runs(comm):
    parent = os.getppid()
    before = _ours(parent)
    comm.barrier()
    own = SharedMemoryCommunicator(comm.group)
    own.all_reduce(torch.ones(10)).wait()
    comm.barrier()
    during = _ours(parent)
    own.close()
    own.close()
    return before == during == []


def test_no_file_is_there_once_the_ranks_have_met(gloo_ranks):
    assert gloo_ranks(3).run(_files_while_it_runs) == [True] * 3


def _random(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def _reduced(comm, numel):
    own = SharedMemoryCommunicator(comm.group)
    tensor = _random(comm.rank, numel)
    own.all_reduce(tensor).wait()
    own.close()
    return tensor


@pytest.mark.parametrize("numel", [1, 3, 1001, 1_000_003])
def test_sums_run_in_the_order_of_ranks_as_those_of_threads_do(gloo_ranks, numel):
    def on_thread(comm):
        tensor = _random(comm.rank, numel)
        comm.all_reduce(tensor).wait()
        return tensor

    expected = run_threads(on_thread, 4)[0]
    assert all(torch.equal(tensor, expected) for tensor in gloo_ranks(4).run(_reduced, numel))


def _long_and_many(comm):
    """More than all slots hold, several at once, and one rank that is slow to read."""
    own = SharedMemoryCommunicator(comm.group)
    add = shm.COMBINE["sum"]
    if comm.rank == 1:
        shm.COMBINE["sum"] = lambda *args, **kwargs: (time.sleep(0.02), add(*args, **kwargs))[1]
    numel = 3 * shm.NUM_SLOTS * shm.SLOT_BYTES // 4 + 5
    ramp = torch.arange(float(numel))
    wholes = [ramp + comm.rank + i for i in range(3)]
    works = [own.all_reduce(whole) for whole in wholes]
    source = ramp.clone() if comm.rank == 1 else torch.zeros(numel)
    works.append(own.broadcast(source, src=1))
    for work in works:
        work.wait()
    own.close()
    shm.COMBINE["sum"] = add
    for i, whole in enumerate(wholes):
        assert torch.equal(whole, comm.world_size * (ramp + i) + sum(range(comm.world_size)))
    assert torch.equal(source, ramp)


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_larger_than_all_slots_pass_through_them(gloo_ranks, world_size):
    gloo_ranks(world_size).run(_long_and_many)


def _without_futex(comm):
    mapped._FUTEX_NUMBER, number = 0, mapped._FUTEX_NUMBER
    try:
        return _reduced(comm, 1001)[0].item()
    finally:
        mapped._FUTEX_NUMBER = number


def test_where_the_kernel_cannot_wake_us_we_nap(gloo_ranks):
    expected = (_random(0, 1001) + _random(1, 1001))[0].item()
    assert gloo_ranks(2).run(_without_futex) == [expected] * 2


def _on_another_host(comm):
    assert ranks_share_host(comm.group)
    name, shm._host = shm._host, lambda: f"host{comm.rank // 2}"
    try:
        assert not ranks_share_host(comm.group)
        with pytest.raises(
            UserError, match="comm: shared memory joins ranks of one host, and rank 2 is on host1, rank 0 on host0"
        ):
            SharedMemoryCommunicator(comm.group)
    finally:
        shm._host = name


def test_ranks_of_several_hosts_are_refused_on_each_of_them(gloo_ranks):
    gloo_ranks(3).run(_on_another_host)


def _no_room(comm):
    assert _ours(os.getppid()) == []
    reserve = mapped._reserve
    if comm.rank == 1:
        mapped._reserve = lambda fd, start, num_bytes: os.posix_fallocate(fd, 0, -1)
    try:
        with pytest.raises(UserError, match=r"comm: \d+ bytes of shared memory are not to be had in"):
            SharedMemoryCommunicator(comm.group)
    finally:
        mapped._reserve = reserve
    comm.barrier()
    return _ours(os.getppid())


def test_a_rank_without_room_stops_all_and_leaves_no_file(gloo_ranks):
    assert gloo_ranks(2).run(_no_room) == [[]] * 2


def _silent(comm):
    own = SharedMemoryCommunicator(comm.group, timeout_s=0.6)
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 is gone: it did not answer within 0.6 s"):
            own.all_reduce(torch.ones(3)).wait()
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match=r"rank 1 is gone: rank 0 found it so"):
            own.all_reduce(torch.ones(3)).wait()  # rank 0 has said whom it lost
    own.close()


def test_a_rank_that_does_not_answer_is_named(gloo_ranks):
    gloo_ranks(2).run(_silent)


CALLS = {
    "another size": lambda comm, own: own.all_reduce(torch.zeros(100 + comm.rank)),
    "another operation": lambda comm, own: (
        own.broadcast(torch.zeros(8), src=0) if comm.rank else own.all_reduce(torch.zeros(8))
    ),
    "another size, where it lies": lambda comm, own: own.all_reduce(own.empty((1 << 20) + comm.rank, torch.float32)),
    "a call fewer": lambda comm, own: [own.all_reduce(torch.zeros(1)) for _ in range(1 + comm.rank)] and own.barrier(),
}


def _diverge(comm, name):
    own = SharedMemoryCommunicator(comm.group, timeout_s=10)
    try:
        work = CALLS[name](comm, own)
        if work is not None:
            work.wait()
        return "passed"
    except PeerError as error:
        return str(error)
    finally:
        own.close()


@pytest.mark.parametrize("name", CALLS)
def test_ranks_in_different_calls_fail_instead_of_reading_each_other(gloo_ranks, name):
    told = gloo_ranks(2).run(_diverge, name)
    assert "rank 1 made another call than this rank" in told or "rank 0 made another call than this rank" in told, told
    assert "passed" not in told


def test_a_file_left_by_a_process_that_died_is_swept_and_a_young_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "folder", lambda: Path(tmp_path))
    old, young = tmp_path / "zeroshard-shm-old", tmp_path / "zeroshard-shm-young"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    segment = mapped.Segment.create(0, 3, 4096)
    assert not old.exists()
    assert young.exists()
    assert segment.path.exists()
    segment.unlink()
    segment.close()
    assert not segment.path.exists()


def test_a_counter_is_seen_by_all_who_map_it(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "folder", lambda: Path(tmp_path))
    mine = mapped.Segment.create(0, 3, 4096)
    theirs = mapped.Segment.attach(mine.path, 0, 3)
    mine.data[:3] = 7
    mine.counters[1].advance(2**40)
    theirs.counters[1].wait(2**40, timeout_s=1)
    assert theirs.data[:4].tolist() == [7, 7, 7, 0]
    assert [counter.value for counter in theirs.counters] == [0, 2**40, 0]
    mine.unlink()
    theirs.close()
    mine.close()
