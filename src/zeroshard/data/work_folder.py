"""The folder ``out`` of a preparation, and the hidden one beside it, in which it works until a rename publishes it.

    .NAME.partial/lock            one process works at a time; the kernel releases it when that process ends, however
    .NAME.partial/plan.json       the choices of the preparation; work that was begun with other choices is not resumed
    .NAME.partial/tokenizer.json  the tokenizer, if it is a file or was trained here
    .NAME.partial/draft/          the folder that will be published
    .NAME.partial/state.json      how much of draft/ is valid; anything beyond that is truncated

A file that must be complete appears by a rename, `state.json` after everything that it counts is on the disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from zeroshard.data.files import Fingerprint
from zeroshard.data.meta import META_NAME, read_meta
from zeroshard.host.errors import UserError, warn
from zeroshard.host.regular_files import flush, json_of, open_regular, read_text, write_inside


@dataclass
class State:
    """How far a preparation has come."""

    next_part: int = 0  # parts that are joined
    # train, val: tokens in the files of each split
    train: int = 0
    val: int = 0
    # num_documents, num_bytes: what was read: documents, and bytes of the source as it is stored
    num_documents: int = 0
    num_bytes: int = 0


def is_prepared(wanted: Mapping[str, Any], fingerprint: Fingerprint, out: Path) -> bool:
    """Whether ``out`` contains these tokens already; raises UserError if it has other content.

    ``wanted``: the choices, as `spec.DataSpec.identity` returns them.
    """
    if not (out / META_NAME).exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = f"{out} exists and is not prepared data (no {META_NAME})"
            raise UserError("data.dir", what, "name another folder")
        return False
    meta = read_meta(out)
    changed = _differences(without_rules(meta.spec), wanted)
    if not changed and meta.source.sha256 != fingerprint.sha256:
        changed = [
            f"another text: {meta.source.num_bytes:,} bytes of {meta.source.description}, sha256 "
            f"{meta.source.sha256[:12]}…, where the source now has {fingerprint.num_bytes:,} bytes, sha256 "
            f"{fingerprint.sha256[:12]}…"
        ]
    if changed:
        what = f"{out} was prepared with {', '.join(changed)}"
        raise UserError("data.dir", what, "name another folder or delete this one")
    return True


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return in words how the choices of two preparations differ."""
    return [
        f"{key} {found.get(key)!r} where {wanted.get(key)!r} is asked for"
        for key in sorted(wanted.keys() | found.keys())
        if wanted.get(key) != found.get(key)
    ]


def without_rules(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folder's choices without the rule by which it was split, which the user does not choose."""
    return {key: value for key, value in spec.items() if key != "split"}


@contextmanager
def work_folder(out: Path, plan: dict[str, Any], *, is_local: bool = True) -> Generator[Path]:
    """Lock and yield the work folder for ``out``; begin it for ``plan``, or resume work with the same plan.

    If another process works in it, wait for that process to end. The folder stays after a failure, so that the work can
    be resumed, except after a UserError: other data or settings cannot resume it.

    Args:
        out: the folder that will be published.
        plan: the choices of the preparation, JSON-serialisable.
        is_local: False: a UserError may be a lost connection, and the folder stays.

    Raises:
        UserError: it was begun with another plan, or cannot be written.
    """
    work = out.parent / f".{out.name}.partial"
    try:
        lock = _locked(work, out)
    except OSError as error:
        todo = "name a folder that can be written, by --data.dir"
        raise UserError("data.dir", f"cannot write {out}: {error.strerror}", todo) from None
    with lock:
        begun = _read_json(work / "plan.json")
        if begun and (changed := _differences(begun, plan)):
            what = f"{work} has unfinished work with other settings: {', '.join(changed)}"
            raise UserError("data.dir", what, "finish that, delete it, or name another folder by --data.dir")
        write_inside(work, "plan.json", json.dumps(plan, indent=2, sort_keys=True))
        try:
            yield work
        except UserError:
            if is_local:
                remove(work)
            raise


def publish(work: Path, out: Path) -> None:
    """Flush the draft to the disk, rename it to ``out``, and delete the work folder.

    Raises:
        OSError: the disk failed, or something is in the way: a rename never replaces a folder that is not empty.
    """
    draft = work / "draft"
    for folder, _, names in os.walk(draft, topdown=False):
        for name in (*names, "."):
            flush(Path(folder, name))
    draft.rename(out)
    flush(out.parent)
    remove(work)


def remove(work: Path) -> None:
    """Delete the work folder."""
    shutil.rmtree(work, ignore_errors=True)


def read_state(work: Path) -> State:
    """Return the state that an earlier process saved; raise UserError if it is damaged."""
    path = work / "state.json"
    found = _read_json(path)
    fits = found.keys() <= asdict(State()).keys() and all(type(value) is int for value in found.values())
    if not fits:
        raise _damaged(path, "it is no state of a preparation")
    return State(**found)


def save_state(work: Path, state: State) -> None:
    """Save the state; everything that it counts must be on the disk already."""
    write_inside(work, "state.json", json.dumps(asdict(state)))


def _locked(work: Path, out: Path) -> IO[str]:
    while True:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(open_regular(work / "lock", os.O_RDWR | os.O_CREAT, follow=False), "r+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warn(f"another process is preparing {out}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (work / "lock").exists() and os.path.samestat(os.fstat(lock.fileno()), (work / "lock").stat()):
            return lock
        lock.close()  # the process that had it has deleted the folder


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that an earlier process wrote; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        found = json_of(read_text(path))
    except ValueError as error:
        raise _damaged(path, error) from None
    if not isinstance(found, dict):
        raise _damaged(path, f"it holds a {type(found).__name__}")
    return found


def _damaged(path: Path, why: object) -> UserError:
    return UserError("data.dir", f"{path} is damaged ({why})", f"delete {path.parent}, and prepare anew")
