"""Saving behind the training that goes on.

    step loop   copy to host | forward, backward, update | forward, ...
    writer           hash and write, flush  | rank 0: manifest, rename, delete old ones

The loop stops for the copy alone; the copy's memory is kept for the next save. Where a save is wanted while one is
still being written, the loop waits for that one first: there is never more than one copy.

State on the CPU need not be copied at all where the writer may read it in place (`zeroshard.checkpoint.copy_on_write`):

    step loop   forward, backward | copy what is not read yet | update | forward, ...
    writer      hash and write, flush ...

State on a GPU is copied to the host by a stream of its own. Neither the host nor what computes waits for that until the
optimizer's step (where ``in_place``; else what computes waits for it at once); the writer does, before it reads.

The writer sends nothing. Communicators order their operations, so what happens in a thread must not issue any; the
ranks agree in `poll`, which the loop calls between steps, whether all have written and whether rank 0 may complete.
Where they wait they agree again and again, so that each rank hears that some other one gets on, however slow its disk.
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
from zeroshard.checkpoint.folder import prune
from zeroshard.checkpoint.host_copies import HostCopies, HostMemory
from zeroshard.checkpoint.shared_outcome import fail_together, first_message
from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.zero.state.named_shards import NamedShard
from zeroshard.zero.streams import ByDevice

_LOOK_S = 0.1  # between two looks at how far a write is


@dataclass(frozen=True)
class Keep:
    """Which checkpoints beside a new one stay: the ``newest`` (0: all), and multiples of ``every`` steps (0: none)."""

    newest: int = 0
    every: int = 0


@dataclass(frozen=True)
class Saved:
    """How a save went; the same on every rank but for seconds and bytes.

    Attributes:
        path: of the checkpoint.
        step: of its state.
        error: why it failed, with the rank; empty where the checkpoint is complete.
        warning: what went wrong after it was complete; empty where nothing did.
        num_bytes: that this rank wrote.
        num_copied_bytes: of them, that had to be copied for the loop to go on.
        stall_s: for which this rank's loop stood still: the copy, and waiting for an earlier save.
        total_s: from the call of `BackgroundSaver.start` until the loop heard of the end.
    """

    path: Path
    step: int
    error: str = ""
    warning: str = ""
    num_bytes: int = 0
    num_copied_bytes: int = 0
    stall_s: float = 0.0
    total_s: float = 0.0


@dataclass
class _Pending:
    saved: Saved
    facts: Facts
    began: float
    work: Future[str] | None = None  # this rank's part of the phase; its result is a warning
    copy_on_write: CopyOnWrite = field(default_factory=CopyOnWrite)
    host_copies: HostCopies = field(default_factory=lambda: HostCopies(ByDevice()))
    completing: bool = False
    done_bytes: int = 0
    num_done: int = 0  # pieces of work, of whatever size
    num_told: int = 0  # of them, those that the ranks have agreed on
    lock: Lock = field(default_factory=Lock)

    def advance(self, num_bytes: int = 0) -> None:
        with self.lock:
            self.done_bytes += num_bytes
            self.num_done += 1


class BackgroundSaver:
    """Saves checkpoints of one set of ranks, one at a time. Every method but `progress` and `close` is collective.

    Args:
        comm: the ranks.
        keep: which older checkpoints ``step-N`` of the same folder stay once a new one is complete.
        background: False writes at once in `start`, without a copy: no memory, and the loop stands still.
        before_commit: run on rank 0 just before a checkpoint takes its name; an OSError fails the save.
        in_place: whether the writer may read state on the CPU where it lies until `settle`, and a GPU's stream may
            copy it until then; buffers, which a forward changes, are copied first all the same.
        on_progress: called on every rank whenever the ranks have heard that one of them has got further.
    """

    def __init__(
        self,
        comm: Communicator,
        keep: Keep = Keep(),
        *,
        background: bool = True,
        before_commit: Callable[[], None] = lambda: None,
        in_place: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm, self._keep, self._background, self._before_commit = comm, keep, background, before_commit
        self._in_place, self._on_progress = in_place, on_progress
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._host, self._streams = HostMemory(), ByDevice()
        self._pending: _Pending | None = None
        self._untold: Saved | None = None  # what a save that is over has come to

    def start(
        self,
        path: str | PathLike[str],
        source: Saveable,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] = lambda done_bytes, num_bytes: None,
    ) -> Saved | None:
        """Begin to save ``source`` as `zeroshard.checkpoint.save` does, and return once its state may change again.

        With ``in_place`` it may not change before `settle`, but for buffers.

        A disk that is full or may not be written raises nothing here: `poll` and `wait` tell.

        Args:
            path, source, step, extra: as of `zeroshard.checkpoint.save`.
            progress: as of `wait`, for an earlier save that must be waited for.

        Returns:
            How the earlier save went, where there was one to wait for.

        Raises:
            ValueError: ``extra`` is not what JSON can hold.
        """
        began = perf_counter()
        earlier = self.wait(progress)
        path, comm = Path(path), self._comm
        self._pending = pending = _Pending(Saved(path, step), api.facts_of(source, step, extra), began)
        try:
            fail_together(comm, "making the folder", lambda: store.begin(path) if comm.rank == 0 else None)
        except OSError as error:
            pending.saved = replace(pending.saved, error=str(error))
            return earlier
        shards = api.collect(source)
        pending.saved = replace(pending.saved, num_bytes=sum(shard.tensor.nbytes for shard in shards))
        shards = self._hold(pending, shards) if self._background else shards
        pending.work = self._pool.submit(self._write, pending, shards)
        pending.saved = replace(pending.saved, stall_s=perf_counter() - began)
        if not self._background:
            saved = self.wait(progress)
            self._untold = None if saved is None else replace(saved, stall_s=saved.total_s)
        return earlier

    def settle(self) -> None:
        """Copy what the writer reads in place and has not written yet: call it before the optimizer's step.

        Not collective; nothing to do where no save is under way, or where all was copied when it began.
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
            saved,
            num_copied_bytes=saved.num_copied_bytes + num_copied,
            stall_s=saved.stall_s + perf_counter() - began,
        )

    def poll(self) -> Saved | None:
        """How the save that is under way went, once that is known; None before, and where none is. Never waits long.

        Raises:
            RuntimeError: a writer failed for another reason than the disk; on every rank.
        """
        pending, comm = self._pending, self._comm
        if pending is None:
            untold, self._untold = self._untold, None
            return untold
        if not pending.saved.error:
            if self._is_writing(pending):
                return None
            pending.saved = self._agree(pending)
            if not pending.saved.error and not pending.completing:
                pending.completing = True
                pending.work = self._pool.submit(self._complete, pending) if comm.rank == 0 else None
                return None
        self._pending = None
        if pending.saved.error and comm.rank == 0:
            api.give_up(pending.saved.path)
        return replace(pending.saved, total_s=perf_counter() - pending.began)

    def wait(self, progress: Callable[[int, int], None] = lambda done_bytes, num_bytes: None) -> Saved | None:
        """How the save that is under way went, as soon as that is known; None where there is none.

        Args:
            progress: told ``(done_bytes, num_bytes)`` of this rank several times a second.
        """
        while self._pending is not None:
            if self._pending.work is not None:
                wait([self._pending.work], _LOOK_S)
            progress(*self.progress)
            saved = self.poll()
            if saved is not None:
                return saved
        return self.poll()

    @property
    def pending(self) -> bool:
        """Whether a save is under way; the same on every rank."""
        return self._pending is not None

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has written of the save that is under way, and all that it has to; zeros without."""
        pending = self._pending
        return (0, 0) if pending is None else (pending.done_bytes, pending.saved.num_bytes)

    def close(self) -> None:
        """Let the writer end what it has begun; a save that the ranks have not agreed on stays incomplete."""
        self._pool.shutdown()
        self._pending, self._host = None, HostMemory()

    def _hold(self, pending: _Pending, shards: Sequence[NamedShard]) -> list[NamedShard]:
        """The same pieces, copied to the host or on their way there, or to be read in place."""
        places = self._host.places([shard.tensor for shard in shards])
        copies = pending.host_copies = HostCopies(self._streams)
        held, in_place, now, later = [], [], [], []
        for shard, place in zip(shards, places, strict=True):
            tensor = shard.tensor.detach()
            stays = self._in_place and shard.kind != "buffer"
            if copies.takes(tensor.device):
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

    def _write(self, pending: _Pending, shards: Sequence[NamedShard]) -> str:
        folder = store.temporary(pending.saved.path)
        pending.host_copies.wait()
        api.write_rank(folder, self._comm, shards, pending.advance, pending.copy_on_write.reading)
        return ""

    def _complete(self, pending: _Pending) -> str:
        self._before_commit()
        api.finish(pending.saved.path, pending.facts, pending.advance)
        try:
            prune(pending.saved.path.parent, self._keep.newest, self._keep.every, pending.advance)
        except OSError as error:
            return f"older checkpoints could not be deleted: {error}"
        return ""

    def _is_writing(self, pending: _Pending) -> bool:
        """Whether any rank is not done with this phase; tells each of them where one has got further. Collective."""
        is_writing, num_done = pending.work is not None and not pending.work.done(), pending.num_done
        words = torch.tensor([is_writing, num_done > pending.num_told], dtype=torch.int64)
        pending.num_told = num_done
        words = words.to(self._comm.control_device)
        with scope(CONTROL):
            self._comm.all_reduce(words, op="max").wait()
        any_writes, any_got_further = words.tolist()
        if any_got_further:
            self._on_progress()
        return bool(any_writes)

    def _agree(self, pending: _Pending) -> Saved:
        """What became of a phase that every rank has ended."""
        failure = None if pending.work is None else pending.work.exception()
        ours = failure is not None and not isinstance(failure, OSError)
        told = json.dumps([ours, f"{type(failure).__name__}: {failure}" if ours else str(failure)])
        words = first_message(self._comm, None if failure is None else told)
        if words is not None:
            rank, (ours, what) = words[0], json.loads(words[1])
            if ours:
                raise RuntimeError(f"rank {rank} failed to write {pending.saved.path}: {what}") from failure
            return replace(pending.saved, error=f"{what} (rank {rank})")
        warning = "" if pending.work is None else pending.work.result()
        warned = first_message(self._comm, warning or None)
        return replace(pending.saved, warning=warned[1] if warned else "")
