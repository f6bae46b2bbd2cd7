"""Memory that ranks share: nothing of it stays, it joins one host alone, and sums run in the order of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from zeroshard.comm import PeerError, SharedMemoryCommunicator, ranks_share_host
from zeroshard.comm.shm import mapped, shm
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


@pytest.mark.parametrize("own", range(4))
@pytest.mark.parametrize("partial", ["apart", "the first part"])
def test_a_sum_in_the_order_of_ranks_may_go_where_a_part_of_it_lies(own, partial):
    parts = [_random(rank, 5) for rank in range(4)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    kept = {rank: part.clone() for rank, part in enumerate(parts) if rank > own}
    shm._combine_in_order(torch.add, parts, parts[own], own, parts[0] if partial != "apart" else torch.empty(5))
    assert torch.equal(parts[own], expected)
    assert all(torch.equal(parts[rank], part) for rank, part in kept.items())


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
        with pytest.raises(UserError, match=r"comm: \d+ bytes of shared memory cannot be allocated in"):
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
    own = SharedMemoryCommunicator(comm.group, timeout_s=120)
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
    assert {f"rank {rank} called a different collective than this rank" for rank in (0, 1)} & set(told), told
    assert "passed" not in told


@pytest.fixture
def segments(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "folder", lambda: Path(tmp_path))
    monkeypatch.setattr(mapped, "_PREFIX", "zeroshard-shm-")
    return tmp_path


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else(segments):
    dead, unnamed, young = (
        segments / "zeroshard-shm-1-x",
        segments / ".zeroshard-shm-1-y",
        segments / ".zeroshard-shm-1-z",
    )
    other, pipe, link = segments / "other", segments / "zeroshard-shm-pipe", segments / "zeroshard-shm-link"
    for path in (dead, unnamed, young, other):
        path.write_bytes(b"x")
    os.utime(unnamed, (1, 1))
    os.mkfifo(pipe)
    link.symlink_to(other)
    child = os.fork()  # another process, whose lock is seen
    if child == 0:
        mapped.Segment.create(0, 3, 4096)
        (segments / "ready").touch()
        signal.pause()
    try:
        while not (segments / "ready").exists():
            time.sleep(0.01)
        (living,) = segments.glob(f"zeroshard-shm-{child}-*")
        first = mapped.Segment.create(0, 3, 4096)
        second = mapped.Segment.create(1, 3, 4096)
        left = {path.name for path in segments.iterdir()}
        expected = {living, young, other, pipe, link, first.path, second.path, segments / "ready"}
        assert left == {path.name for path in expected}
        assert mapped._is_locked(os.open(living, os.O_RDWR))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    third = mapped.Segment.create(2, 3, 4096)
    assert not living.exists()
    for segment in (first, second, third):
        segment.unlink()
        segment.close()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.chmod(0o666), "others than its owner may write to it"),
        (lambda path: path.with_name("more").hardlink_to(path), "it has another name, too"),
        (lambda path: os.truncate(path, 100), "it has 100 bytes"),
        (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "it is a symbolic link"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "it is a named pipe"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_only_a_segment_of_ones_own_is_attached(segments, spoil, why):
    own = mapped.Segment.create(0, 3, 4096)
    spoil(own.path)
    with pytest.raises(OSError, match=why):
        mapped.Segment.attach(own.path, 1, 3)
    own.close()


def test_a_segment_of_another_user_is_not_attached(segments, monkeypatch):
    theirs = mapped.Segment.create(0, 3, 4096)
    monkeypatch.setattr(os, "geteuid", lambda: theirs.path.stat().st_uid + 1)
    with pytest.raises(OSError, match="it belongs to another user"):
        mapped.Segment.attach(theirs.path, 1, 3)
    monkeypatch.undo()
    theirs.close()


def test_a_file_that_another_rank_names_and_is_no_segment_stays_as_it_is(segments):
    precious = segments / "precious"
    precious.write_bytes(bytes(9000))
    precious.chmod(0o600)
    with pytest.raises(OSError, match="it is not called as a segment is"):
        mapped.Segment.attach(precious, 1, 3)
    assert precious.read_bytes() == bytes(9000)
