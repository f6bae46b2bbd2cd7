"""Many checkpoints in one folder: which there are, which is the newest, which are kept."""

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

RUN_FOLDER = "checkpoints"  # of a run, which holds many
BEST = "best"  # a link to the checkpoint of the lowest validation loss
_NAME = re.compile(r"\.?step-(\d+)(\.tmp|\.old)?")


def step_name(step: int) -> str:
    """The folder's name of the state after ``step`` steps: ``step-00001000``."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Found:
    """A checkpoint by its name; ``complete`` exactly when its manifest is there."""

    path: Path
    step: int
    complete: bool


def find(folder: str | PathLike[str]) -> list[Found]:
    """Every checkpoint ``step-N`` in ``folder``, newest first, unfinished ones too; none where there is no folder."""
    found: dict[Path, Found] = {}
    for entry in Path(folder).glob("*step-*"):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir():
            path = entry.with_name(entry.name.removeprefix(".").removesuffix(match[2] or ""))
            found[path] = Found(path, int(match[1]), store.resolve(path) is not None)
    return sorted(found.values(), key=lambda each: (-each.step, each.path.name))


def is_complete(path: str | PathLike[str]) -> bool:
    """Whether there is a complete checkpoint called ``path``; nothing is verified."""
    return store.resolve(Path(path)) is not None


def set_aside(folder: str | PathLike[str], after: int) -> list[Path]:
    """Rename complete checkpoints of steps after ``after`` to ``step-N.aside``, where nothing here finds them any more.

    Returns:
        Where they lie now, oldest first.

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
    """The newest complete checkpoint ``step-N`` in ``folder``; None where there is none. Nothing is verified."""
    return next((each.path for each in find(folder) if each.complete), None)


def no_checkpoint(path: str | PathLike[str]) -> UserError:
    """What to raise where ``path`` is no complete checkpoint; a run folder's newest one is named in its place."""
    path = Path(path)
    why = f"no {MANIFEST}" if path.exists() else "there is no such folder"
    newest = latest(path) or latest(path / RUN_FOLDER)
    return UserError(str(path), f"is not a complete checkpoint: {why}", f"name {newest or 'another one'}")


def name_best(folder: str | PathLike[str], step: int) -> None:
    """Have ``folder/best`` name the checkpoint of ``step``, if that is complete.

    Raises:
        OSError: the folder cannot be written, or has no links.
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
    """The steps whose checkpoints go: all but the ``newest`` newest and the multiples of ``every``, in order.

    Args:
        steps: whose complete checkpoints there are.
        newest: how many to keep at least; 0 keeps all.
        every: steps; 0 keeps nothing on account of its number.
    """
    if not newest:
        return []
    return [step for step in sorted(steps)[:-newest] if not every or step % every]


def prune(folder: Path, newest: int, every: int, progress: Callable[[], None] = lambda: None) -> list[Path]:
    """Delete what `surplus` names, and what interrupted saves left of steps before the newest complete one.

    ``progress`` is called after each folder. The checkpoint that ``best`` names stays.

    Returns:
        The checkpoints that were complete and are gone.

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
