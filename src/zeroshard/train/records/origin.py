"""Where and when a run began: command, host, commit of the code, version. ``metrics.jsonl`` keeps them for reports."""

from __future__ import annotations

import shlex
import socket
import sys
from datetime import datetime
from pathlib import Path

import zeroshard
from zeroshard.host.masked_addresses import masked
from zeroshard.host.regular_files import read_text

_PROGRAMS = ("zeroshard", "__main__.py")  # the command, and `python -m zeroshard`


def now() -> str:
    """The time of day with its offset to UTC, as ISO 8601: ``2026-03-01T17:04:05.678+01:00``."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def origin() -> dict[str, str]:
    """The command line without secrets, the host's name, zeroshard's version, and the commit if there is one."""
    words = ["zeroshard", *sys.argv[1:]] if Path(sys.argv[0]).name in _PROGRAMS else sys.argv
    commit = commit_of(Path(zeroshard.__file__).resolve().parents[2], upwards=False) or commit_of(Path.cwd())
    found = {"command": shlex.join(map(masked, words)), "host": socket.gethostname(), "version": zeroshard.__version__}
    return {**found, "commit": commit} if commit else found


def commit_of(folder: Path, *, upwards: bool = True) -> str:
    """The commit that is checked out in the git repository of ``folder``, in hexadecimal; empty if there is none.

    The files of git are read and git itself is not run, because its settings in a foreign folder may run programs.

    Args:
        upwards: whether the repository may begin in a folder above.
    """
    for each in (folder, *folder.parents) if upwards else (folder,):
        if (each / ".git").exists():
            try:
                return _head(each / ".git")
            except (OSError, ValueError):
                return ""
    return ""


def _head(git: Path) -> str:
    if git.is_file():  # of a further working tree or a submodule: it names the folder
        git = git.parent / read_text(git).removeprefix("gitdir:").strip()
    head = read_text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return _hexadecimal(head)
    name = head.removeprefix("ref:").strip()
    common = git / read_text(git / "commondir").strip() if (git / "commondir").is_file() else git
    for place in (git / name, common / name):
        if place.is_file():
            return _hexadecimal(read_text(place).strip())
    packed = (line.split() for line in read_text(common / "packed-refs").splitlines())
    return next((_hexadecimal(words[0]) for words in packed if words[1:] == [name]), "")


def _hexadecimal(text: str) -> str:
    int(text, 16)  # raises ValueError
    return text
