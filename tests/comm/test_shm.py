"""Memory that ranks share: it joins one host alone, and sums run in the order of ranks."""

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from zeroshard.comm import PeerError, SharedMemoryCommunicator, ranks_share_host
from zeroshard.comm.shm import mapped, shm
from zeroshard.host.errors import UserError


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


@pytest.mark.redundant(but=["2"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_larger_than_all_slots_pass_through_them(gloo_ranks, world_size):
    """`_long_and_many` asserts it."""
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
    """`_on_another_host` asserts it."""
    gloo_ranks(3).run(_on_another_host)


def _no_room(comm):
    def ours():
        gc.collect()
        links = (path.resolve().name for path in Path("/proc/self/fd").iterdir())
        return sum(name.startswith("memfd:zeroshard-shm") for name in links)

    reserve, before = mapped._reserve, ours()
    if comm.rank == 1:
        mapped._reserve = lambda fd, start, num_bytes: os.posix_fallocate(fd, 0, -1)
    try:
        with pytest.raises(UserError, match=r"comm: \d+ bytes of shared memory cannot be allocated"):
            SharedMemoryCommunicator(comm.group)
    finally:
        mapped._reserve = reserve
    return ours() - before


def test_a_rank_without_room_stops_all_and_nothing_stays_open(gloo_ranks):
    assert gloo_ranks(2).run(_no_room) == [0] * 2


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
    """`_silent` asserts it."""
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


def test_nothing_but_a_segment_is_attached(tmp_path):
    precious = tmp_path / "zeroshard-shm"
    precious.write_bytes(bytes(9000))
    os.mkfifo(tmp_path / "pipe")
    with precious.open("r+b") as file:
        for path in (precious, tmp_path / "pipe", f"/proc/self/fd/{file.fileno()}", f"/proc/{os.getpid()}/fd/99999"):
            with pytest.raises(OSError, match=r"no shared memory of this user|named pipe|No such file"):
                mapped.Segment.attach(str(path), 1, 3)
    assert precious.read_bytes() == bytes(9000)


def test_a_segment_of_another_user_is_not_attached(monkeypatch):
    theirs = mapped.Segment.create(0, 3, 4096)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(OSError, match="no shared memory of this user"):
        mapped.Segment.attach(theirs.path, 1, 3)
    theirs.close()


@pytest.mark.parametrize("num_bytes", [4096, 1 << 60])
def test_a_segment_says_whether_its_owner_lives(num_bytes):
    """Also one that may map no more memory, as under `ulimit -v`."""
    heard, told = os.pipe()
    attached, go = os.pipe()
    child = os.fork()  # another process, whose lock is seen
    if child == 0:
        own = mapped.Segment.create(0, 3, 4096)
        os.write(told, own.path.encode())
        os.read(attached, 1)
        with contextlib.suppress(OSError):
            kept = own.extend(num_bytes)  # noqa: F841
        os.write(told, b"done")
        signal.pause()
    try:
        segment = mapped.Segment.attach(os.read(heard, 100).decode(), 0, 3)
        os.write(go, b".")
        assert os.read(heard, 100) == b"done"
        assert segment.owner_lives()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not segment.owner_lives()
    segment.close()
    for end in (heard, told, attached, go):
        os.close(end)
