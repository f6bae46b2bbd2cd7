"""Many checkpoints in one folder: find them, find the newest, delete old ones, and tell those that do not belong there.

[Note: What lies where]
    A checkpoint is known by the name of its folder (``step-00001000``), and a folder of them by the run in it. Neither
    is in the checksums of files, so a copy under another name, two folders that were swapped, or one of another run
    would pass for what their place says. So a manifest has the step, and ``extra["run"]`` the run's identity, which is
    also in the file `RUN_ID` beside the checkpoints of a run of the trainer. Whoever opens a checkpoint compares them.
"""

from __future__ import annotations

import itertools
import os
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from zeroshard.checkpoint import store
from zeroshard.checkpoint.manifest import MANIFEST, Manifest, parse
from zeroshard.host.errors import UserError, shown
from zeroshard.host.regular_files import read_text, write_inside

RUN_FOLDER = "checkpoints"  # subfolder of a run's folder
BEST = "best"  # a link to the checkpoint of the lowest validation loss
RUN_ID = "run-id"  # a file with the identity of the run whose checkpoints these are
_MOST_ID_BYTES = 256
_NAME = re.compile(r"\.?step-(\d+)(\.tmp|\.old)?")
_OF_A_STEP = re.compile(r"step-(\d{8,})(\.aside\d*)?")


def step_name(step: int) -> str:
    """Return the folder name of the state after ``step`` steps: ``step-00001000``."""
    return f"step-{step:08d}"


def other_step(path: Path, step: int) -> str:
    """Say that the name of the folder ``path`` is that of another step than ``step``; empty if it is not."""
    for name in (path.name, path.resolve().name):
        match = _OF_A_STEP.fullmatch(name)
        if match and int(match[1]) != step:
            return f"is of step {step}, and the name {name} of step {int(match[1])}"
    return ""


def misplaced(path: Path, manifest: Manifest) -> UserError | None:
    """Return the error for a checkpoint that lies where one of another step or run is expected, if it does.

    See [Note: What lies where].
    """
    if what := other_step(path, manifest.step):
        return UserError(str(path), what, f"name it {step_name(manifest.step)}, or take another checkpoint")
    here, run = run_of(path.absolute().parent), manifest.extra.get("run")
    if here and run is not None and run != here:
        what = f"is of run {shown(run)}, and its folder of run {shown(here)}"
        return UserError(str(path), what, "move it into a folder of its own, and give its path")
    return None


def run_of(folder: Path) -> str:
    """The identity of the run whose checkpoints are in ``folder``; empty if that is not known."""
    try:
        return read_text(folder / RUN_ID, _MOST_ID_BYTES, follow=False).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def identity(folder: Path) -> str:
    """`run_of`; if there is no such file, what the newest checkpoint says, and else a new one."""
    if known := run_of(folder):
        return known
    newest = latest(folder)
    try:
        run = parse(newest / MANIFEST).extra.get("run") if newest else None
    except UserError:  # damaged; who loads it says so
        run = None
    return run if isinstance(run, str) and run else uuid.uuid4().hex[:12]


def keep_identity(folder: Path, run: str) -> None:
    """Write `RUN_ID` if it is not there. Raises OSError."""
    if not run_of(folder):
        write_inside(folder, RUN_ID, f"{run}\n")


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


def surplus(steps: Collection[int], newest: int, every: int, uncounted: Collection[int] = ()) -> list[int]:
    """Return, in order, the steps to delete: all but the ``newest`` newest, the multiples of ``every``, and later ones.

    Args:
        steps: the steps that have a complete checkpoint.
        newest: how many of the newest to keep; 0 keeps all.
        every: steps; 0 keeps none for being a multiple.
        uncounted: steps that are not counted as kept; of these only those before the newest kept one are deleted.
    """
    kept = sorted(step for step in steps if step not in uncounted)[-newest:] if newest else []
    return [
        step for step in sorted(steps) if kept and step < kept[-1] and step not in kept and (not every or step % every)
    ]


def prune(folder: Path, newest: int, every: int, uncounted: Collection[int] = ()) -> None:
    """Delete the checkpoints that `surplus` names, and temporary folders of steps before the newest complete one.

    The checkpoint that ``best`` points to stays.

    Raises:
        OSError: a folder cannot be deleted.
    """
    found = find(folder)
    complete = [each.step for each in found if each.complete]
    gone = set(surplus(complete, newest, every, uncounted))
    best = os.readlink(folder / BEST) if (folder / BEST).is_symlink() else ""
    for each in found:
        if each.step < max(complete, default=0):
            store.remove(store.temporary(each.path))
    for each in found:
        if each.complete and each.step in gone and each.path.name != best:
            store.remove_named(each.path)
