"""Saving behind the steps: what is saved is of the moment of the call, errors reach every rank, one at a time."""

import threading
from pathlib import Path

import pytest
import torch

from fake_time import Clock
from zeroshard import checkpoint
from zeroshard.checkpoint import BackgroundSaver, background, store
from zeroshard.checkpoint.copy_on_write import CopyOnWrite
from zeroshard.comm import LocalCommunicator, run_threads


@pytest.fixture
def gate(monkeypatch):
    """`gate.set()` lets writers go on that wait since they began."""
    opened, write = threading.Event(), background.api.write_rank

    def waiting(*args):
        assert opened.wait(600)
        write(*args)

    monkeypatch.setattr(background.api, "write_rank", waiting)
    yield opened
    opened.set()


def _reload(path, evenly_sharded, tensors):
    target = evenly_sharded(LocalCommunicator(), tensors)
    checkpoint.load(path, target)
    return target.loaded


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_saved_is_the_state_at_the_call_whatever_becomes_of_it(
    tmp_path, evenly_sharded, some_tensors, gate, world_size
):
    before = {key: tensor.clone().reshape(-1) for key, tensor in some_tensors.items()}
    changed = threading.Barrier(world_size)

    def rank_main(comm):
        source, saver = evenly_sharded(comm, some_tensors), BackgroundSaver(comm)
        assert saver.start(tmp_path / "step-1", source, step=1, extra={"note": 7}) is None
        assert saver.poll() is None
        changed.wait()
        if comm.rank == 0:
            for tensor in some_tensors.values():
                tensor.zero_()
        changed.wait()
        assert saver.pending
        changed.wait()  # nobody writes before everybody has looked
        gate.set()
        saved = saver.wait()
        saver.close()
        return saved

    for saved in run_threads(rank_main, world_size):
        assert (saved.error, saved.step) == ("", 1)
        assert 0 < saved.stall_s <= saved.total_s
    for key, tensor in _reload(tmp_path / "step-1", evenly_sharded, some_tensors).items():
        assert torch.equal(tensor, before[key]), key
    assert checkpoint.read_manifest(tmp_path / "step-1").extra == {"note": 7}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("written_first", [False, True])
def test_lent_state_is_saved_as_it_was_and_copied_only_where_the_update_comes_first(
    tmp_path, evenly_sharded, some_tensors, gate, world_size, written_first
):
    before = {key: tensor.clone().reshape(-1) for key, tensor in some_tensors.items()}
    together = threading.Barrier(world_size)

    def rank_main(comm):
        source, saver = evenly_sharded(comm, some_tensors), BackgroundSaver(comm, in_place=True)
        saver.start(tmp_path / "step-1", source, step=1)
        together.wait()
        for (_, kind), tensor in some_tensors.items():
            if kind == "buffer" and comm.rank == 0:
                tensor.zero_()  # as a forward may
        if written_first:
            gate.set()
            saver._pending.work.result(20)
        saver.settle()
        together.wait()
        if comm.rank == 0:
            for tensor in some_tensors.values():
                tensor.zero_()
        together.wait()
        gate.set()
        saver.settle()  # a second update while the save is under way has nothing to wait for
        saved = saver.wait()
        saver.close()
        return saved

    for saved in run_threads(rank_main, world_size):
        assert saved.error == ""
        if not written_first:
            assert saved.num_copied_bytes == saved.num_bytes
    if written_first and world_size == 1:
        buffers = [tensor for (_, kind), tensor in some_tensors.items() if kind == "buffer"]
        assert saved.num_copied_bytes == sum(tensor.numel() * tensor.element_size() for tensor in buffers)
    loaded = _reload(tmp_path / "step-1", evenly_sharded, some_tensors)
    for key, expected in before.items():
        assert torch.equal(loaded[key], expected), key


def test_an_update_waits_for_what_is_being_read():
    tensor, reading, read, seen = torch.ones(4), threading.Event(), threading.Event(), []
    lent = CopyOnWrite([(tensor, torch.empty(4))])

    def write():
        with lent.reading(tensor) as content:
            reading.set()
            assert read.wait(600)
            seen.append(content.clone())

    def update():
        lent.settle()
        tensor.zero_()

    writer, updater = threading.Thread(target=write), threading.Thread(target=update)
    writer.start()
    assert reading.wait(600)
    updater.start()
    updater.join(0.1)
    assert updater.is_alive()
    read.set()
    writer.join(20)
    updater.join(20)
    assert torch.equal(seen[0], torch.ones(4))
    assert torch.equal(tensor, torch.zeros(4))


def test_a_second_save_waits_for_the_first_and_tells_of_it(tmp_path, evenly_sharded, some_tensors, gate):
    saver = BackgroundSaver(LocalCommunicator())
    source, seen, poll = evenly_sharded(LocalCommunicator(), some_tensors), [], saver.poll

    def polled():
        seen.append(saver.pending)
        gate.set()
        return poll()

    saver.start(tmp_path / "step-1", source, step=1)
    saver.poll = polled
    first = saver.start(tmp_path / "step-2", source, step=2)
    assert first.step == 1
    assert seen[0]
    assert checkpoint.verify(tmp_path / "step-1") == ()
    assert saver.wait().step == 2
    assert saver.wait() is None
    assert not saver.pending
    saver.close()


@pytest.mark.parametrize("in_background", [True, False])
def test_seconds_of_a_save_count_from_its_call_and_those_that_it_stalls_a_run_from_there_to_its_return(
    tmp_path, evenly_sharded, some_tensors, monkeypatch, gate, in_background
):
    clock, write = Clock(), background.api.write_rank  # which waits for the gate

    def slow(*args):
        write(*args)
        clock.now += 4.0

    monkeypatch.setattr(background, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(background.api, "write_rank", slow)
    saver = BackgroundSaver(LocalCommunicator(), background=in_background)
    if not in_background:
        gate.set()
    saver.start(tmp_path / "step-1", evenly_sharded(LocalCommunicator(), some_tensors), step=1)
    clock.now += 2.0  # a step of the run
    gate.set()
    saved = saver.wait()
    saver.close()
    assert (saved.total_s, saved.stall_s) == ((6.0, 0.0) if in_background else (4.0, 4.0))


def test_the_copys_memory_is_used_again(tmp_path, evenly_sharded, some_tensors):
    saver = BackgroundSaver(LocalCommunicator())
    places = []
    for step in (1, 2, 3):
        saver.start(tmp_path / f"step-{step}", evenly_sharded(LocalCommunicator(), some_tensors), step=step)
        places.append(saver._host._block.data_ptr())
        saver.wait()
    saver.close()
    assert places == places[:1] * 3


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_is_named_to_all_and_the_next_save_may_succeed(
    tmp_path, evenly_sharded, some_tensors, monkeypatch, in_background, failing
):
    write, full = store.write_tensors, True

    def full_disk(file, *args):
        if full and file.name.startswith(f"rank-{failing:05d}"):
            raise OSError(28, "No space left on device")
        return write(file, *args)

    monkeypatch.setattr(store, "write_tensors", full_disk)

    def save(comm, step):
        saver = BackgroundSaver(comm, background=in_background)
        saver.start(tmp_path / f"step-{step}", evenly_sharded(comm, some_tensors), step=step)
        saved = saver.wait()
        saver.close()
        return saved.error

    said = f"[Errno 28] No space left on device (rank {failing})"
    assert run_threads(lambda comm: save(comm, 1), 2) == [said] * 2
    assert list(tmp_path.iterdir()) == []
    full = False
    assert run_threads(lambda comm: save(comm, 2), 2) == ["", ""]
    assert checkpoint.verify(tmp_path / "step-2") == ()


def test_a_folder_that_cannot_be_made_is_told_by_wait(tmp_path, evenly_sharded, some_tensors):
    (tmp_path / "file").write_text("in the way")

    def rank_main(comm):
        saver = BackgroundSaver(comm)
        assert saver.start(tmp_path / "file" / "step-1", evenly_sharded(comm, some_tensors), step=1) is None
        saved = saver.poll()
        saver.close()
        return saved.error

    assert all("Not a directory" in error or "File exists" in error for error in run_threads(rank_main, 2))


def test_a_bug_in_a_writer_is_raised_on_every_rank(tmp_path, evenly_sharded, some_tensors, monkeypatch):
    write = store.write_tensors

    def broken(file, *args):
        if file.name.startswith("rank-00001"):
            raise ZeroDivisionError("oh")
        return write(file, *args)

    monkeypatch.setattr(store, "write_tensors", broken)

    def rank_main(comm):
        saver = BackgroundSaver(comm)
        saver.start(tmp_path / "step-1", evenly_sharded(comm, some_tensors), step=1)
        with pytest.raises(RuntimeError, match=r"rank 1 failed to write .*: ZeroDivisionError: oh"):
            saver.wait()
        saver.close()

    run_threads(rank_main, 2)


def test_extra_that_json_cannot_hold_is_refused_at_once(tmp_path, evenly_sharded, some_tensors):
    saver = BackgroundSaver(LocalCommunicator())
    for extra in ({"loss": float("inf")}, {"path": Path("x")}):
        with pytest.raises(ValueError, match="JSON"):
            saver.start(tmp_path / "c", evenly_sharded(LocalCommunicator(), some_tensors), step=1, extra=extra)
    assert saver.wait() is None
    assert list(tmp_path.iterdir()) == []
    saver.close()
