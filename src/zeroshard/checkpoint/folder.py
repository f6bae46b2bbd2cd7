"""Many checkpoints in one folder: find them, find the newest, and delete old ones."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from zeroshard.checkpoint import store
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.errors import UserError

RUN_FOLDER = "checkpoints"  # subfolder of a run's folder
BEST = "best"  # a link to the checkpoint of the lowest validation loss
_NAME = re.compile(r"\.?step-(\d+)(\.tmp|\.old)?")


def step_name(step: int) -> str:
    """Return the folder name of the state after ``step`` steps: ``step-00001000``."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Found:
    """A checkpoint found by its name; ``complete`` exactly if its manifest exists."""

    path: Path
    step: int
    complete: bool


def find(folder: str | PathLike[str]) -> list[Found]:
    """Return every checkpoint ``step-N`` in ``folder``, newest first, also incomplete ones; empty without a folder."""
    found: dict[Path, Found] = {}
    for entry in Path(folder).glob("*step-*"):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir():
            path = entry.with_name(entry.name.removeprefix(".").removesuffix(match[2] or ""))
            found[path] = Found(path, int(match[1]), store.resolve(path) is not None)
    return sorted(found.values(), key=lambda each: (-each.step, each.path.name))


def is_complete(path: str | PathLike[str]) -> bool:
    """Whether there is a complete checkpoint called ``path``; its content is not verified."""
    return store.resolve(Path(path)) is not None


def set_aside(folder: str | PathLike[str], after: int) -> list[Path]:
    """Rename complete checkpoints of steps after ``after`` to ``step-N.aside``, so that `find` no longer returns them.

    Returns:
        Their new paths, oldest first.

    Raises:
        OSError: one cannot be renamed.
    """
    moved = []
    for each in reversed(find(folder)):
        lies = store.resolve(each.path)
        if lies is None or each.step <= after:
            continue
        names = (f"{each.path.name}.aside{number}" for number in itertools.chain([""], itertools.count(2)))
        moved.append(lies.rename(next(path for name in names if not (path := each.path.with_name(name)).exists())))
    return moved


def latest(folder: str | PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint ``step-N`` in ``folder``, or None; its content is not verified."""
    return next((each.path for each in find(folder) if each.complete), None)


def no_checkpoint(path: str | PathLike[str]) -> UserError:
    """Return the error for a ``path`` that is no complete checkpoint; it suggests the newest one below ``path``."""
    path = Path(path)
    why = f"no {MANIFEST}" if path.exists() else "there is no such folder"
    newest = latest(path) or latest(path / RUN_FOLDER)
    return UserError(str(path), f"is not a complete checkpoint: {why}", f"name {newest or 'another one'}")


def name_best(folder: str | PathLike[str], step: int) -> None:
    """Make the link ``folder/best`` point to the checkpoint of ``step``, if that is complete.

    Raises:
        OSError: the folder cannot be written, or its file system has no links.
    """
    folder = Path(folder)
    link, target = folder / BEST, step_name(step)
    if not is_complete(folder / target) or (link.is_symlink() and os.readlink(link) == target):
        return
    draft = folder / f".{BEST}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)


def surplus(steps: Collection[int], newest: int, every: int) -> list[int]:
    """Return, in order, the steps to delete: all except the ``newest`` newest and the multiples of ``every``.

    Args:
        steps: the steps that have a complete checkpoint.
        newest: how many of the newest to keep; 0 keeps all.
        every: steps; 0 keeps none for being a multiple.
    """
    if not newest:
        return []
    return [step for step in sorted(steps)[:-newest] if not every or step % every]


def prune(folder: Path, newest: int, every: int, progress: Callable[[], None] = lambda: None) -> list[Path]:
    """Delete the checkpoints that `surplus` names, and temporary folders of steps before the newest complete one.

    The checkpoint that ``best`` points to stays. ``progress`` is called after each folder.

    Returns:
        The complete checkpoints that were deleted.

    Raises:
        OSError: a folder cannot be deleted.
    """
    found = find(folder)
    complete = [each.step for each in found if each.complete]
    gone = set(surplus(complete, newest, every))
    best = os.readlink(folder / BEST) if (folder / BEST).is_symlink() else ""
    deleted = [each.path for each in found if each.complete and each.step in gone and each.path.name != best]
    for each in found:
        if each.step < max(complete, default=0):
            store.remove(store.temporary(each.path))
            progress()
    for path in deleted:
        store.remove_named(path)
        progress()
    return deleted
