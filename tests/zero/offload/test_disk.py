"""Units' tensors come back from the file as they were written, however slow, full or contested the disk is."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from zeroshard.comm import NullCommunicator
from zeroshard.host.errors import ExitStatus, UserError, path_line
from zeroshard.host.finalizers import settle
from zeroshard.zero import Offload, Zero
from zeroshard.zero.offload import disk
from zeroshard.zero.offload.disk import BLOCK_BYTES, DiskStates
from zeroshard.zero.offload.executor import Executor, Update
from zeroshard.zero.offload.grad_slots import GradSlots
from zeroshard.zero.offload.rank_files import file_of_rank, left_behind, rank_file
from zeroshard.zero.offload.staging import Staging

SPEC = [(5, torch.float32), (1000, torch.float32), (7, torch.bfloat16), (0, torch.float32)]


# writes three units as `tensors` makes them, and is killed before it writes one of them again
KILLED = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from zeroshard.zero.offload.disk import DiskStates
class Unit: pass
states, units = DiskStates(Path(sys.argv[1])), [Unit() for _ in range(3)]
views = [states.add(unit, [torch.ones(1000), torch.ones(7)]) for unit in units]
states.expect(units)
states.read(units[0])[0].add_(1)
states.write(units[0])
states.read(units[1])[0].add_(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Unit:
    """A key, by number: units are objects that can be gone."""

    def __init__(self, number):
        self.number = number


UNITS = [Unit(number) for number in range(5)]


def filled(states, num_units):
    """The views of units with the values of `tensors`."""
    views = [states.add(unit, tensors(unit.number)) for unit in UNITS[:num_units]]
    states.expect(UNITS[:num_units])
    return views


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
    expected = [tensors(unit) for unit in range(5)]
    views = [states.add(UNITS[unit], values) for unit, values in enumerate(expected)]
    for unit, size in enumerate(sizes):  # states come with the first step, at the end of the file
        more = tensors(unit, [(size, torch.float64)])
        expected[unit] += more
        views[unit] += states.add(UNITS[unit], more)
    for step in range(3):
        states.expect(UNITS)
        for unit, values in enumerate(expected):
            found = states.read(UNITS[unit])
            assert same(found, values)
            assert all(tensor.data_ptr() % 64 == 0 for tensor in found)
            for there, value in zip(found, values, strict=True):
                value.add_(1)
                there.add_(1)
            states.write(UNITS[unit])
            states.wait(UNITS[unit])
            assert same(views[unit], values)
        states.settle()
        for unit in (4, 0, 2, 2, 1, 3):  # a checkpoint reads in any order, and loads
            assert same(views[unit], expected[unit])
            for there, value in zip(views[unit], expected[unit], strict=True):
                there.mul_(0.5 + step)
                value.mul_(0.5 + step)
    size = sum(disk.extent_bytes([(v.numel(), v.dtype) for v in part]) for e in expected for part in (e[:-1], e[-1:]))
    assert states.num_bytes == path.stat().st_size == size
    assert states.num_bytes % BLOCK_BYTES == 0
    assert states.bytes_written == states.bytes_read == 3 * states.num_bytes
    assert states.slot_bytes <= 3 * (24000 + 3 * BLOCK_BYTES)
    states.close()
    states.close()
    assert not path.exists()


def test_a_place_is_given_again_once_nothing_shows_it(path):
    states = DiskStates(path)
    kept = [Unit(number) for number in range(3)]
    views = [states.add(unit, tensors(unit.number)) for unit in kept]
    size, held = states.num_bytes, views[1][1]
    del kept[1], views[1]
    gc.collect()
    kept.append(Unit(7))
    views.append(states.add(kept[-1], tensors(7)))
    assert states.num_bytes == size + disk.extent_bytes(SPEC)  # somebody has a view of the old one
    assert torch.equal(held, tensors(1)[1])
    del held
    gc.collect()
    views.append(states.add(kept[-1], tensors(8)))
    assert states.num_bytes == size + disk.extent_bytes(SPEC)
    states.expect(kept)
    assert same(states.read(kept[-1]), tensors(7) + tensors(8))
    states.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the kernel does not say what is resident")
def test_pages_that_were_touched_between_steps_are_dropped_when_the_next_begins(path):
    states = DiskStates(path)
    unit, numel = Unit(0), 1 << 20
    [view] = states.add(unit, [torch.ones(numel)])

    def resident(text="Rss"):
        maps = Path("/proc/self/smaps").read_text().split(f"{path}\n")
        assert len(maps) > 1
        return sum(int(part.split(f"{text}:")[1].split()[0]) * 1024 for part in maps[1:])

    assert resident() == 0
    view.add_(1)
    assert resident() >= 4 * numel
    states.expect([unit])
    assert resident() == 0
    assert torch.equal(states.read(unit)[0], torch.full((numel,), 2.0))
    assert torch.equal(view, torch.full((numel,), 2.0))
    states.close()


def test_the_next_unit_is_read_while_one_is_updated_and_no_other(path, monkeypatch):
    states = DiskStates(path)
    views = filled(states, 5)
    began = []
    monkeypatch.setattr(disk, "_read", lambda file, path, into, at: began.append(at))
    region = disk.extent_bytes(SPEC)
    states.read(UNITS[0])
    deadline = time.monotonic() + 600
    while len(began) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert began == [0, region]
    states.read(UNITS[1])
    states._slot_of(UNITS[2]).reading[0].result()
    assert began == [0, region, 2 * region]
    states.close()
    del views


def test_a_slow_disk_changes_no_value(path, monkeypatch):
    for name in ("_read", "_write"):
        quick = getattr(disk, name)
        monkeypatch.setattr(disk, name, lambda *given, quick=quick: (time.sleep(0.003), quick(*given)))
    states = DiskStates(path, num_threads=2)
    views = filled(states, 4)
    for step in range(2):
        states.expect(UNITS[:4])
        for unit in UNITS[:4]:
            found = states.read(unit)
            assert same(found, [value + 1 if step else value for value in tensors(unit.number)])
            for tensor in found:
                tensor.add_(1)
            states.write(unit)
        states.settle()
    assert all(same(view, [value + 1 + 1 for value in tensors(unit)]) for unit, view in enumerate(views))
    states.close()


def test_a_disk_without_room_is_refused_before_anything_is_written(path, monkeypatch):
    def full(file, start, num_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"^offload.path: .*-00003.states needs 1,000 bytes more, and [\d,]+ are free"):
        DiskStates(path, 1000)
    states = DiskStates(path)
    with pytest.raises(UserError, match="free space, or name a folder on another disk"):
        states.add(UNITS[0], tensors(0))
    assert UNITS[0] not in states
    states.close()


def test_a_disk_that_is_full_in_a_step_is_one_line_and_loses_nothing(path, monkeypatch):
    states = DiskStates(path)
    views = filled(states, 4)
    write, full = disk.os.pwritev, True

    def pwritev(*given):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*given)

    monkeypatch.setattr(disk.os, "pwritev", pwritev)
    for tensor in states.read(UNITS[1]):
        tensor.add_(1)
    states.write(UNITS[1])
    with pytest.raises(OSError, match="No space left"):
        states.wait(UNITS[1])
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as said:
            states.settle()
    status, line = path_line(said.value)
    assert status == ExitStatus.STORAGE
    assert line == f"{path}: No space left on device; free space, or name a place on another disk"
    with pytest.raises(OSError, match="No space left"):  # its slot is not given to another unit
        [states.read(UNITS[unit]) for unit in (2, 3, 0, 1)]
    full = False
    states.settle()
    assert all(same(views[unit], tensors(unit)) for unit in (2, 3, 0))
    assert same(views[1], [value + 1 for value in tensors(1)])
    states.close()


def test_a_file_that_became_shorter_is_an_error_that_names_it(path):
    states = DiskStates(path)
    views = filled(states, 4)
    os.truncate(path, BLOCK_BYTES)
    with pytest.raises(OSError, match="it has 4,096 bytes, too few: another program has changed it") as said:
        states.read(UNITS[1])
    assert said.value.filename == str(path)
    states.close()
    del views


def test_what_was_written_may_be_read_in_its_slot_until_another_unit_has_that(path):
    states = DiskStates(path)
    _views = filled(states, 4)
    for tensor in states.read(UNITS[0]):
        tensor.add_(1)
    with states.in_memory(UNITS[0]) as copies:
        assert copies is None  # the update is under way
    states.write(UNITS[0])
    states.read(UNITS[1])  # the third slot is read ahead into
    entered, left, taken = threading.Event(), threading.Event(), threading.Event()

    def read():
        with states.in_memory(UNITS[0]) as copies:
            entered.set()
            assert left.wait(600)
            assert not taken.is_set()
            return [copy.clone() for copy in copies]

    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(read)
        assert entered.wait(600)
        taking = pool.submit(lambda: (states.read(UNITS[2]), taken.set()))  # the next one is read ahead
        try:
            with pytest.raises(TimeoutError):
                taking.result(0.1)
        finally:
            left.set()
        assert same(found.result(60), [tensor + 1 for tensor in tensors(0)])
        taking.result(60)
    with states.in_memory(UNITS[0]) as copies:
        assert copies is None
    for wait in (lambda: states.wait(UNITS[2]), states.settle):  # who waits may write to the file; a walk ends
        states.read(UNITS[2])
        states.write(UNITS[2])
        with states.in_memory(UNITS[2]) as copies:
            assert copies is not None
        wait()
        with states.in_memory(UNITS[2]) as copies:
            assert copies is None
    states.close()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to advise")
def test_slots_lie_in_huge_pages_where_the_kernel_has_them(path):
    """A disk walks 2.5 times as fast in them, as a request has a part for each page."""
    states = DiskStates(path)
    _views = filled(states, 2)
    address = states.read(UNITS[0])[0].data_ptr()
    states.settle()
    flags, here = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        here = int(span[1], 16) <= address < int(span[2], 16) if span else here
        flags = line if here and line.startswith("VmFlags:") else flags
    assert "hg" in flags.split()
    states.close()


def test_one_run_at_a_time_uses_a_file(path):
    first = DiskStates(path)
    view = first.add(UNITS[0], tensors(0))
    with pytest.raises(UserError, match=r"^offload.path: .*rank-00003.states is in use by another run; end that run"):
        DiskStates(path)
    assert same(first.read(UNITS[0]), tensors(0))
    first.close()
    assert same(view, tensors(0))  # in a file without a name
    kept = DiskStates(path, keep=True)
    kept.add(UNITS[0], tensors(1))
    del kept
    gc.collect()
    assert path.stat().st_size == disk.extent_bytes(SPEC)
    third = DiskStates(path)
    assert path.stat().st_size == 0
    third.close()


@pytest.mark.redundant
def test_a_run_that_is_killed_between_two_units_leaves_a_file_that_the_next_takes_over(path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=600)
    assert ended.returncode == -signal.SIGKILL
    assert path.stat().st_size == 3 * BLOCK_BYTES
    states = DiskStates(path)  # the lock ended with the process
    assert path.stat().st_size == 0
    view = states.add(UNITS[0], tensors(7))
    assert same(view, tensors(7))
    states.close()


def test_threads_end_with_the_object(path):
    before = threading.active_count()
    states = DiskStates(path)
    states.add(UNITS[0], tensors(0))
    states.read(UNITS[0])
    assert threading.active_count() > before
    del states
    settle()
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


def test_an_engine_that_nobody_refers_to_gives_its_file_to_the_next(tmp_path):
    for _ in range(3):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        zero = Zero(net, 2, comm=NullCommunicator(1), offload=Offload("disk", "disk", path=tmp_path))
        optim = zero.optimizer(torch.optim.AdamW)
        net(torch.ones(2, 8)).sum().backward()
        optim.step()
        assert [each.name for each in tmp_path.iterdir()] == ["rank-00000.states"]
        del zero, optim, net


def test_a_unit_is_read_once_its_input_is_there(path, monkeypatch):
    """Gradients are read ahead of their unit's update, so the read itself waits for them."""
    states, begin, read = DiskStates(path), threading.Event(), []
    units = [Unit(number) for number in range(2)]
    values = [tensors(unit.number, [(3000, torch.float32)]) for unit in units]
    shown = [states.add_input(unit, 1000, torch.bfloat16) for unit in units]
    masters = [states.add(unit, value) for unit, value in zip(units, values, strict=True)]
    slots = GradSlots(states, Staging(None))
    given = [torch.full((1000,), 1.0 + unit.number, dtype=torch.bfloat16) for unit in units]
    write = disk._write

    def slowly(*args):
        assert begin.wait(600)
        write(*args)

    monkeypatch.setattr(disk, "_write", slowly)
    for unit, grads in zip(units, given, strict=True):
        slots.send(unit, grads)
    states.expect(units)
    walk = threading.Thread(target=lambda: read.extend(states.read(unit)[0].clone() for unit in units))
    walk.start()
    walk.join(0.2)
    assert not read
    begin.set()
    walk.join(600)
    assert same(read, given)
    states.settle()
    before = states.bytes_written
    for unit in units:
        inputs, master = states.read(unit)
        inputs.zero_()  # a clip factor changes the copy alone
        master.add_(1)
        states.write(unit)
    states.settle()
    assert same(shown, given)
    assert all(torch.equal(there, value[0] + 1) for [there], value in zip(masters, values, strict=True))
    assert states.bytes_written - before == 2 * disk.extent_bytes([(3000, torch.float32)])


def test_a_slot_of_gradients_is_filled_again_once_its_write_is_over(path, monkeypatch):
    states, write = DiskStates(path), disk._write
    units = [Unit(number) for number in range(5)]
    shown = [states.add_input(unit, 1000 + unit.number, torch.float32) for unit in units]
    slots = GradSlots(states, Staging(None))
    given = [torch.full((1000 + unit.number,), 1.0 + unit.number) for unit in units]
    monkeypatch.setattr(disk, "_write", lambda *args: (time.sleep(0.02), write(*args)))
    landings = [slots.send(unit, grads) for unit, grads in zip(units, given, strict=True)]
    assert len(slots.memory) == 2
    for landing in landings:
        landing.synchronize()
    assert same(shown, given)


def test_gradients_that_cannot_be_written_are_an_error_with_the_name_of_the_file(path, monkeypatch):
    states, unit = DiskStates(path), Unit(0)
    states.add_input(unit, 1000, torch.float32)

    def full(*_args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk.os, "pwritev", full)
    landing = GradSlots(states, Staging(None)).send(unit, torch.ones(1000))
    with pytest.raises(OSError, match="Input/output error") as error:
        landing.synchronize()
    assert error.value.filename == str(path)


def test_the_end_of_a_run_removes_its_own_file_wherever_the_process_works_by_then(tmp_path, monkeypatch):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    one = DiskStates(Path("states") / "rank-00000.states")
    monkeypatch.chdir(tmp_path / "other")
    other = DiskStates(Path("states") / "rank-00000.states")
    one.close()
    assert not (tmp_path / "one" / "states").exists()
    assert other.path == tmp_path / "other" / "states" / "rank-00000.states"
    assert other.path.exists()
    other.close()


@pytest.mark.parametrize("made_by_a_user", [False, True])
def test_files_of_a_killed_run_are_removed_and_said_and_a_folder_that_was_made_goes_with_the_last(
    tmp_path, capsys, made_by_a_user
):
    folder = tmp_path / "states"
    if made_by_a_user:
        folder.mkdir()
    other = file_of_rank(folder, 1)
    for rank in (0, 3):
        (folder / f"rank-{rank:05d}.states").write_bytes(bytes(100))
    assert [path.name for path in left_behind(folder)] == ["rank-00000.states", "rank-00003.states"]
    own = file_of_rank(folder, 0)
    what = "2 files of a run that was killed (200 bytes): a run resumes from its checkpoint; removed"
    assert capsys.readouterr().err == f"warning: offload.path: {folder} had {what}\n"
    assert sorted(path.name for path in folder.glob("rank-*")) == ["rank-00000.states", "rank-00001.states"]
    own.close()
    assert folder.exists()
    other.close()
    assert folder.exists() == made_by_a_user
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_removed_stays(tmp_path, monkeypatch):
    own = file_of_rank(tmp_path / "states", 0)

    def busy(folder):
        raise OSError(errno.EBUSY, "it is mounted", os.fspath(folder))

    monkeypatch.setattr(Path, "rmdir", busy)
    own.close()
    assert not own.path.exists()
    assert own.path.parent.exists()


@pytest.mark.parametrize("ends_too", [False, True])
def test_a_rank_that_makes_its_file_while_another_removes_the_folder_removes_it_later(tmp_path, monkeypatch, ends_too):
    own, others, rmdir = file_of_rank(tmp_path / "states", 0), [], Path.rmdir

    def at_the_same_time(folder):
        if not others:
            others.append(file_of_rank(folder, 1))
        try:
            rmdir(folder)
        finally:
            if ends_too:
                others[0].close()

    monkeypatch.setattr(Path, "rmdir", at_the_same_time)
    own.close()
    assert own.path.parent.exists() != ends_too
    others[0].close()
    assert not own.path.parent.exists()


def test_an_update_that_the_disk_ends_raises_an_error_of_the_disk():
    for error in (OSError(errno.EIO, "no", "file"), UserError("offload.path", "full", "free space")):
        if isinstance(error, UserError):
            error.__cause__ = OSError(errno.EIO, "no", "file")
        executor = Executor()
        update = Update("a", executor)

        def fails(error=error):
            raise error

        executor.arm([(update, fails)])
        for _ in range(2):
            with pytest.raises(OSError, match=r"^.Errno 5. step: the update of unit a failed: .*'file'$") as said:
                update.wait()
            assert (said.value.errno, said.value.filename) == (errno.EIO, "file")
