"""Background checkpoint saves: a thread hashes and writes the state while training continues.

    step loop   copy to host | forward, backward, update | forward, ...
    writer           hash and write, flush  | rank 0: manifest, rename

A save blocks the training loop only for the copy to the host; the copy's memory is reused by the next save. If a save
starts while an earlier one is still being written, the loop first waits for the earlier one, so there is never more
than one copy of the state.

State on the CPU need not be copied at all if the writer may read it in place (`zeroshard.checkpoint.copy_on_write`):

    step loop   forward, backward | copy what is not read yet | update | forward, ...
    writer      hash and write, flush ...

State on a GPU is copied to the host on a separate stream. The host does not wait for these copies. With ``in_place``
the compute stream waits for them only at the optimizer's step; without it, the compute stream waits at once. The writer
waits for them before it reads.

The writer thread issues no collectives: a communicator orders its operations, and a second thread would break that
order. Instead the ranks agree in `poll`, which the loop calls between steps, whether all of them have written and
whether rank 0 may complete the checkpoint. `wait` calls `poll` repeatedly, so each rank learns that some other rank
makes progress, however slow that rank's disk is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import torch

from zeroshard.checkpoint import api, store
from zeroshard.checkpoint.api import Facts, Saveable
from zeroshard.checkpoint.copy_on_write import CopyOnWrite
from zeroshard.checkpoint.host_copies import HostCopies, HostMemory
from zeroshard.comm import CONTROL, Communicator, labelled
from zeroshard.comm.agree import first_message
from zeroshard.comm.every_rank import call_of_every_rank
from zeroshard.comm.streams import ByDevice
from zeroshard.optim.named_shards import NamedShard

_LOOK_S = 0.1  # between two polls of a write's progress


@dataclass(frozen=True)
class Saved:
    """The outcome of a save; the same on every rank except for the seconds and bytes."""

    path: Path  # the checkpoint's folder
    step: int  # the number of optimizer steps done in the saved state
    error: str = ""  # why the save failed, with the rank; empty if the checkpoint is complete
    num_bytes: int = 0  # bytes that this rank writes
    num_copied_bytes: int = 0  # those of ``num_bytes`` that had to be copied before training could continue
    # seconds for which the save blocked this rank's training loop: copying state, and waiting for an earlier save
    stall_s: float = 0.0
    total_s: float = 0.0  # seconds from the call of `BackgroundSaver.start` until the loop learned the outcome


@dataclass
class _Pending:
    saved: Saved
    facts: Facts
    began: float
    work: Future[None] | None = None  # this rank's part of the current phase
    copy_on_write: CopyOnWrite = field(default_factory=CopyOnWrite)
    host_copies: HostCopies = field(default_factory=lambda: HostCopies(ByDevice()))
    completing: bool = False
    num_done: int = 0  # finished units of work, of any size
    num_reported: int = 0  # `num_done` when this rank last told the others
    lock: Lock = field(default_factory=Lock)

    def advance(self) -> None:
        with self.lock:
            self.num_done += 1


class BackgroundSaver:
    """Saves checkpoints of one set of ranks, one at a time.

    Collective methods, which every rank must call: `start`, `poll`, `wait`.

    Args:
        background: False: `start` writes at once and without a copy, which saves memory and blocks the training loop.
        require_folder: called on rank 0 before a checkpoint's folder is made, and before the checkpoint is completed
            and renamed; an OSError fails the save.
        in_place: whether the writer may read CPU state in place until `settle`, and a GPU's stream may copy GPU state
            until then. Buffers are copied first all the same, because a forward changes them.
        on_progress: called on every rank whenever the ranks learn that one of them has made progress.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        background: bool = True,
        require_folder: Callable[[], None] = lambda: None,
        in_place: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm, self._background, self._require_folder = comm, background, require_folder
        self._in_place, self._on_progress = in_place, on_progress
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._host, self._streams = HostMemory(), ByDevice()
        self._pending: _Pending | None = None
        self._unreported: Saved | None = None  # the outcome of a finished save that no call has returned yet

    def start(
        self,
        path: str | PathLike[str],
        source: Saveable,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
    ) -> Saved | None:
        """Begin to save ``source`` as `zeroshard.checkpoint.save` does; return as soon as its state may change again.

        With ``in_place`` only buffers may change when this returns; all other state must stay as it is until `settle`.

        A disk that is full or not writable raises nothing here: `poll` and `wait` report it.

        Args:
            path, source, step, extra: as for `zeroshard.checkpoint.save`.

        Returns:
            The outcome of the earlier save if there was one to wait for, else None.

        Raises:
            ValueError: JSON cannot represent ``extra``, or it, or the name of ``path``, has another ``step``.
        """
        began = perf_counter()
        earlier = self.wait()
        path, comm = Path(path), self._comm
        call_of_every_rank(comm, "BackgroundSaver.start")
        self._pending = pending = _Pending(Saved(path, step), api.facts_of(path, source, step, extra), began)
        try:
            with api.making_folder(comm, source):
                if comm.rank == 0:
                    self._require_folder()
                    store.begin(path)
        except OSError as error:
            pending.saved = replace(pending.saved, error=str(error))
            return earlier
        shards = api.collect(source)
        pending.saved = replace(pending.saved, num_bytes=sum(shard.tensor.nbytes for shard in shards))
        shards = self._hold(pending, shards) if self._background else shards
        pending.work = self._pool.submit(self._write, pending, shards)
        pending.saved = replace(pending.saved, stall_s=perf_counter() - began)
        if not self._background:
            saved = self.wait()
            self._unreported = None if saved is None else replace(saved, stall_s=saved.total_s)
        return earlier

    def settle(self) -> None:
        """Copy the state that the writer has not read yet: call this before the optimizer's step.

        State on the CPU that is not written yet is copied at once; for state on a GPU the current stream waits for the
        copies in flight. Not collective. Does nothing if no save is in progress, or if `start` has copied all of the
        state.
        """
        pending, began = self._pending, perf_counter()
        if pending is None or pending.work is None:
            return
        pending.host_copies.settle()
        if pending.work.done():
            return
        num_copied = pending.copy_on_write.settle()
        saved = pending.saved
        pending.saved = replace(
            saved, num_copied_bytes=saved.num_copied_bytes + num_copied, stall_s=saved.stall_s + perf_counter() - began
        )

    def poll(self) -> Saved | None:
        """Return the outcome of the save in progress once it is known, else None; never waits for a writer. Collective.

        Raises:
            RuntimeError: a writer failed for another reason than the disk; raised on every rank.
        """
        pending, comm = self._pending, self._comm
        if pending is None:
            unreported, self._unreported = self._unreported, None
            return unreported
        if not pending.saved.error:
            if self._is_writing(pending):
                return None
            pending.saved = self._agree(pending)
            if not pending.saved.error and not pending.completing:
                pending.completing = True
                pending.work = self._pool.submit(self._complete, pending) if comm.rank == 0 else None
                return None
        self._pending = None
        if pending.saved.error and comm.rank == 0 and pending.work is not None:  # else nothing there is of this save
            api.give_up(pending.saved.path)
        return replace(pending.saved, total_s=perf_counter() - pending.began)

    def wait(self) -> Saved | None:
        """Wait for the save in progress and return its outcome; None if there is none to report. Collective."""
        while self._pending is not None:
            if self._pending.work is not None:
                wait([self._pending.work], _LOOK_S)
            saved = self.poll()
            if saved is not None:
                return saved
        return self.poll()

    @property
    def pending(self) -> bool:
        """Whether a save is in progress; the same on every rank."""
        return self._pending is not None

    def close(self) -> None:
        """Let the writer thread finish its current work; a save that the ranks have not agreed on stays incomplete."""
        self._pool.shutdown()
        self._pending, self._host = None, HostMemory()

    def _hold(self, pending: _Pending, shards: Sequence[NamedShard]) -> list[NamedShard]:
        """Return the same shards with tensors that the writer may read: host copies, pending host copies, or the
        originals.
        """
        places = self._host.places([shard.tensor for shard in shards])
        copies = pending.host_copies = HostCopies(self._streams)
        held, in_place, now, later = [], [], [], []
        for shard, place in zip(shards, places, strict=True):
            tensor = shard.tensor.detach()
            stays = self._in_place and shard.kind != "buffer"
            if copies.accepts(tensor.device):
                (later if stays else now).append((tensor, place))
                tensor = place
            elif stays:
                in_place.append((tensor, place))
            else:
                tensor = place.copy_(tensor)
            held.append(replace(shard, tensor=tensor))
        copies.begin(now)
        copies.settle()
        copies.begin(later)
        pending.copy_on_write = CopyOnWrite(in_place)
        num_copied = pending.saved.num_bytes - sum(tensor.nbytes for tensor, _ in in_place)
        pending.saved = replace(pending.saved, num_copied_bytes=num_copied)
        return held

    def _write(self, pending: _Pending, shards: Sequence[NamedShard]) -> None:
        folder = store.temporary(pending.saved.path)
        pending.host_copies.wait()
        api.write_rank(folder, self._comm, shards, lambda num_bytes: pending.advance(), pending.copy_on_write.reading)

    def _complete(self, pending: _Pending) -> None:
        self._require_folder()
        api.finish(pending.saved.path, pending.facts, pending.advance)

    def _is_writing(self, pending: _Pending) -> bool:
        """Whether any rank has not finished this phase; also reports progress to `on_progress`. Collective."""
        is_writing, num_done = pending.work is not None and not pending.work.done(), pending.num_done
        words = torch.tensor([is_writing, num_done > pending.num_reported], dtype=torch.int64)
        pending.num_reported = num_done
        words = words.to(self._comm.control_device)
        with labelled(CONTROL):
            self._comm.all_reduce(words, op="max").wait()
        any_writes, any_got_further = words.tolist()
        if any_got_further:
            self._on_progress()
        return bool(any_writes)

    def _agree(self, pending: _Pending) -> Saved:
        """Return the outcome of a phase that every rank has finished: the first rank's error, if any. Collective."""
        failure = None if pending.work is None else pending.work.exception()
        ours = failure is not None and not isinstance(failure, OSError)
        report = json.dumps([ours, f"{type(failure).__name__}: {failure}" if ours else str(failure)])
        words = first_message(self._comm, None if failure is None else report)
        if words is not None:
            rank, (ours, what) = words[0], json.loads(words[1])
            if ours:
                raise RuntimeError(f"rank {rank} failed to write {pending.saved.path}: {what}") from failure
            return replace(pending.saved, error=f"{what} (rank {rank})")
        return pending.saved
