"""Units' tensors come back from the file as they were written, however slow, full or contested the disk is."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from zeroshard.errors import ExitStatus, UserError, path_line
from zeroshard.zero.offload import disk
from zeroshard.zero.offload.disk import BLOCK_BYTES, DiskStates, rank_file

SPEC = [(5, torch.float32), (1000, torch.float32), (7, torch.bfloat16), (0, torch.float32)]


# writes three units as `tensors` makes them, and is killed before it writes one of them again
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from zeroshard.zero.offload.disk import DiskStates
states = DiskStates(Path(sys.argv[1]))
for unit in range(3):
    states.put(unit, [torch.ones(1000), torch.ones(7)])
states.settle()
states.read(0)[0].add_(1)
states.write(0)
states.read(1)[0].add_(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def tensors(seed, spec=SPEC):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=made).to(dtype) for numel, dtype in spec]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def path(tmp_path):
    return rank_file(tmp_path / "offload", 3)


@pytest.mark.parametrize("direct", [True, False])
def test_units_come_back_over_steps_that_change_them(path, monkeypatch, direct):
    if not direct:
        monkeypatch.setattr(disk.os, "O_DIRECT", 0)
    monkeypatch.setattr(disk, "PIECE_BYTES", BLOCK_BYTES)  # several pieces a unit
    states = DiskStates(path)
    assert states.is_direct <= direct
    sizes = [1, 3000, 10, 1500, 8]
    expected = {unit: tensors(unit, [*SPEC, (size, torch.float64)]) for unit, size in enumerate(sizes)}
    for unit, values in expected.items():
        assert same(states.put(unit, values), values)
    for _ in range(3):
        for unit in expected:
            found = states.read(unit)
            assert same(found, expected[unit])
            assert all(tensor.data_ptr() % 64 == 0 for tensor in found)
            for there, value in zip(found, expected[unit], strict=True):
                value.add_(1)
                there.add_(1)
            states.write(unit)
    for unit in (4, 0, 2, 2, 1, 3):  # a checkpoint reads in any order
        assert same(states.read(unit), expected[unit])
    states.settle()
    expected[1] = [value * 2 for value in expected[1]]
    states.put(1, expected[1])  # a checkpoint is loaded
    assert same(states.read(1), expected[1])
    assert (
        states.num_bytes
        == path.stat().st_size
        == sum(disk.region_bytes([(v.numel(), v.dtype) for v in values]) for values in expected.values())
    )
    assert states.num_bytes % BLOCK_BYTES == 0
    assert states.bytes_written == 4 * states.num_bytes + disk.region_bytes([*SPEC, (3000, torch.float64)])
    assert states.slot_bytes <= 3 * 32768
    states.close()
    states.close()
    assert not path.exists()


def test_the_next_unit_is_read_while_one_is_updated_and_no_other(path, monkeypatch):
    states = DiskStates(path)
    for unit in range(5):
        states.put(unit, tensors(unit))
    states.settle()
    began = []
    monkeypatch.setattr(disk, "_read", lambda file, path, into, at: began.append(at))
    region = disk.region_bytes(SPEC)
    states.read(0)
    deadline = time.monotonic() + 30
    while len(began) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert began == [0, region]
    states.read(1)
    states._slot_of(2).reading[0].result()
    assert began == [0, region, 2 * region]
    states.close()


def test_a_slow_disk_changes_no_value(path, monkeypatch):
    for name in ("_read", "_write"):
        quick = getattr(disk, name)
        monkeypatch.setattr(disk, name, lambda *given, quick=quick: (time.sleep(0.003), quick(*given)))
    states = DiskStates(path, num_threads=2)
    for unit in range(4):
        states.put(unit, tensors(unit))
    for step in range(2):
        for unit in range(4):
            found = states.read(unit)
            assert same(found, [value + step for value in tensors(unit)])
            for tensor in found:
                tensor.add_(1)
            states.write(unit)
    states.close()


def test_a_disk_without_room_is_refused_before_anything_is_written(path, monkeypatch):
    def full(file, start, num_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"^offload.path: .*-00003.states needs 1,000 bytes more, and [\d,]+ are free"):
        DiskStates(path, 1000)
    states = DiskStates(path)
    with pytest.raises(UserError, match="free space, or name a folder on another disk"):
        states.put("h.0", tensors(0))
    assert "h.0" not in states
    states.close()


def test_a_disk_that_is_full_in_a_step_is_one_line_and_loses_nothing(path, monkeypatch):
    states = DiskStates(path)
    for unit in range(4):
        states.put(unit, tensors(unit))
    states.settle()
    write, full = disk.os.pwritev, True

    def pwritev(*given):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*given)

    monkeypatch.setattr(disk.os, "pwritev", pwritev)
    for tensor in states.read(1):
        tensor.add_(1)
    states.write(1)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as said:
            states.settle()
    status, line = path_line(said.value)
    assert status == ExitStatus.STORAGE
    assert line == f"{path}: No space left on device; free space, or name a place on another disk"
    with pytest.raises(OSError, match="No space left"):  # its slot is not given to another unit
        [states.read(unit) for unit in (2, 3, 0, 1)]
    full = False
    states.settle()
    for unit in (2, 3, 0):
        assert same(states.read(unit), tensors(unit))
    assert same(states.read(1), [value + 1 for value in tensors(1)])
    states.close()


def test_a_file_that_became_shorter_is_an_error_that_names_it(path):
    states = DiskStates(path)
    for unit in range(4):
        states.put(unit, tensors(unit))
    states.settle()
    os.truncate(path, BLOCK_BYTES)
    with pytest.raises(OSError, match="it has 4,096 bytes, too few: another program has changed it") as said:
        states.read(0)
    assert said.value.filename == str(path)
    states.close()


def test_one_run_at_a_time_uses_a_file(path):
    first = DiskStates(path)
    first.put(0, tensors(0))
    with pytest.raises(UserError, match=r"^offload.path: .*rank-00003.states is in use by another run; end that run"):
        DiskStates(path)
    assert same(first.read(0), tensors(0))
    first.close()
    kept = DiskStates(path, keep=True)
    kept.put(0, tensors(1))
    del kept
    gc.collect()
    assert path.stat().st_size == disk.region_bytes(SPEC)
    third = DiskStates(path)
    assert path.stat().st_size == 0
    third.close()


def test_a_run_that_is_killed_between_two_units_leaves_a_file_that_the_next_takes_over(path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=600)
    assert ended.returncode == -signal.SIGKILL
    assert path.stat().st_size == 3 * BLOCK_BYTES
    states = DiskStates(path)  # the lock ended with the process
    assert path.stat().st_size == 0
    states.put(0, tensors(7))
    assert same(states.read(0), tensors(7))
    states.close()


def test_threads_end_with_the_object(path):
    before = threading.active_count()
    states = DiskStates(path)
    states.put(0, tensors(0))
    assert threading.active_count() > before
    del states
    gc.collect()
    assert threading.active_count() == before
    assert not path.exists()


def test_a_link_or_a_folder_at_the_path_is_refused(path):
    path.parent.mkdir()
    path.symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        DiskStates(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        DiskStates(path)
