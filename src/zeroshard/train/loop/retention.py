"""Which of a run's checkpoints are deleted, and when: old ones, once those that stay have proved to be sound.

Weights may be ruined by an update, a device or a disk. Every loss is NaN from then on, and if each checkpoint that is
saved meanwhile pushed out an older one, the run would delete the last good ones before it is given up. So nothing is
deleted while steps are skipped, what is saved then counts as none of those that are kept, and what is saved before
counts once a later step, or an evaluation of the same weights, had a finite loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import find, prune, read_manifest
from zeroshard.host.errors import UserError, warn


class Retention:
    """Deletes checkpoints in ``folder``, in a thread, while training continues. On rank 0.

    Args:
        folder: the run's checkpoints.
        newest: how many to keep; 0 keeps all.
        every: checkpoints at multiples of this many steps are kept too; 0: none.
    """

    def __init__(self, folder: Path, newest: int, every: int) -> None:
        self._folder, self._newest, self._every = folder, newest, every
        self._pool = ThreadPoolExecutor(1, "checkpoint-delete")
        self._work: Future[None] | None = None
        self._unproven: set[int] = set()  # steps that were saved, with no finite loss since
        self._uncounted = _saved_while_skipping(folder, newest)
        self._is_due = False

    def began(self, step: int, *, proven: bool, skipping: bool) -> None:
        """Record that ``step`` will be saved.

        Args:
            step: the number of steps done.
            proven: whether an evaluation of these weights had a finite loss.
            skipping: whether the last steps were skipped, as their losses were NaN or Inf.
        """
        self._uncounted.discard(step)
        if skipping:
            self._uncounted.add(step)
        elif not proven:
            self._unproven.add(step)

    def completed(self) -> None:
        """Record that a checkpoint is complete, so that an old one may go."""
        self._is_due = True

    def proved(self) -> None:
        """Record that the present weights had a finite loss, and begin to delete what that makes superfluous."""
        self._is_due |= bool(self._unproven)
        self._unproven.clear()
        self._begin()

    def newest_sound(self) -> Path | None:
        """The newest complete checkpoint whose weights had a finite loss afterwards; None if there is none."""
        unsure = self._unproven | self._uncounted
        return next((each.path for each in find(self._folder) if each.complete and each.step not in unsure), None)

    def wait(self) -> None:
        """Wait until what is being deleted is gone; warn if it cannot be deleted."""
        work, self._work = self._work, None
        try:
            if work is not None:
                work.result()
        except OSError as error:
            warn(f"{self._folder}: older checkpoints could not be deleted: {error}")

    def finish(self, *, skipping: bool) -> None:
        """Delete what can be deleted at the end of a run, and wait for it; ``skipping`` as for `began`."""
        if not skipping:
            self._begin()
        self.wait()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _begin(self) -> None:
        if self._is_due:
            self.wait()
            self._is_due = False
            unsure = self._unproven | self._uncounted
            self._work = self._pool.submit(prune, self._folder, self._newest, self._every, unsure)


def _saved_while_skipping(folder: Path, newest: int) -> set[int]:
    """Steps of checkpoints that an earlier attempt saved while steps were skipped, or that are damaged.

    Older ones than the ``newest`` that count are not looked at.
    """
    found, num_counted = set[int](), 0
    for each in find(folder) if newest else ():
        if num_counted == newest:
            break
        if each.complete and _counts(each.path):
            num_counted += 1
        else:
            found.add(each.step)
    return found


def _counts(path: Path) -> bool:
    try:
        extra = read_manifest(path).extra
    except UserError:
        return False
    replicas = extra.get("guards")
    return not any(map(is_skipping, [extra.get("guard"), *(replicas if isinstance(replicas, list) else [])]))


def is_skipping(guard: Any) -> bool:
    """Whether the last step had a NaN/Inf, by the state of its `StepGuard`."""
    return isinstance(guard, Mapping) and bool(guard.get("not_finite_in_a_row"))
