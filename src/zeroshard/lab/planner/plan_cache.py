"""Caches the answers of `zeroshard plan` in the user's cache folder, so that a repeated question needs no torch.

The key is a digest of everything that an answer depends on: the settings, the device (its file may change), this
package's sources, and the versions of Python and of the packages that compute. Some answers depend on more and are not
cached: a dry run, which measures; the user's own model or optimizer, whose code may change; and kernels that are
requested by name, which this machine may not support.

An entry that is damaged, or cannot be read or written, is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import zeroshard
from zeroshard.errors import UserError
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.predict.hardware import find_device
from zeroshard.process import cache_folder
from zeroshard.regular_files import json_of, read_text

FOLDER = "plans"
MOST_ENTRIES = 500
_USED = ("torch", "triton", "numpy", "pydantic", "peft")
_KEYED_KERNELS = ("auto", "reference")


class PlanAnswer(NamedTuple):
    """The exit status, and what is printed."""

    status: int
    text: str


def answered(config: PlanConfig, compute: Callable[[PlanConfig], PlanAnswer], width: int = 0) -> PlanAnswer:
    """The cached answer to ``config``, or else the result of ``compute``, which is then cached.

    ``width``: columns of the terminal that ``compute`` formats the answer for.

    Raises:
        UserError: from ``compute``; nothing is cached.
    """
    path = _place(config, width)
    found = None if path is None else _kept(path)
    if found is not None:
        return found
    answer = compute(config)
    if path is not None:
        _keep(path, answer)
    return answer


def _place(config: PlanConfig, width: int) -> Path | None:
    """The cache file of this question; None if its answer may not be cached."""
    own_code = ":" in config.model.name or ":" in config.optimizer
    if not config.cache or config.dry_run or own_code or config.kernels not in _KEYED_KERNELS:
        return None
    folder = cache_folder()
    return None if folder is None else folder / FOLDER / f"{_key(config, width)}.json"


def _key(config: PlanConfig, width: int) -> str:
    facts = {
        "width": width,
        "settings": config.model_dump(mode="json", exclude={"cache"}),
        "device": [repr(find_device(name)) for name in config.gpu_names],
        "sources": sources_sha256(),
        "versions": {name: _version(name) for name in _USED},
        "python": sys.version,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@cache
def sources_sha256() -> str:
    """The digest of the path and content of every Python file of this package."""
    package = Path(zeroshard.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _kept(path: Path) -> PlanAnswer | None:
    try:
        entry = json_of(read_text(path))
    except (OSError, ValueError, RecursionError, UserError):
        return None
    if not isinstance(entry, dict):
        return None
    status, text = entry.get("status"), entry.get("text")
    if type(status) is not int or not isinstance(text, str) or entry.get("sha256") != _digest(status, text):
        return None
    return PlanAnswer(status, text)


def _keep(path: Path, answer: PlanAnswer) -> None:
    """Write an entry under a temporary name and rename it, so that readers see all of it or nothing."""
    status, text = int(answer.status), answer.text
    entry = {"status": status, "text": text, "sha256": _digest(status, text)}
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}.unfinished")
    with contextlib.suppress(OSError):  # if the home is full or read-only, the next answer is computed again
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            return
        unfinished.write_text(json.dumps(entry), encoding="utf-8")
        unfinished.replace(path)
        _forget_oldest(path.parent)


def _forget_oldest(folder: Path) -> None:
    entries = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime)
    for each in entries[:-MOST_ENTRIES]:
        each.unlink()


def _digest(status: int, text: str) -> str:
    return hashlib.sha256(f"{status}\n{text}".encode()).hexdigest()
