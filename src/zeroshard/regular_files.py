"""Files that somebody names, or that lie in a folder that somebody names, opened without waiting and read to a limit.

A FIFO in a file's place keeps whoever opens it waiting until somebody writes, a terminal until somebody types, and
``/dev/zero`` never ends. So a name is opened with O_NONBLOCK, what was opened is looked at (`os.fstat`, for the name
may lead elsewhere a moment later), and anything but a regular file is refused. What is read whole has a limit.

All errors are OSErrors whose ``strerror`` says what is wrong, so whoever tells the user of a file that cannot be read
tells of these too.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from io import BufferedReader, StringIO
from os import PathLike
from typing import Any

SETTINGS_BYTES = 16 << 20  # of files that people or their tools write: settings, descriptions of models and data
LOG_BYTES = 4 << 30  # of what grows with a run: metrics
_READ_BYTES = 1 << 20
_MOST_DIGITS = 30  # of an integer, with its sign
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666, *, follow: bool = True) -> int:
    """A descriptor of the regular file ``path``, which the caller closes; never waits. An ``opener`` for `open`, too.

    Args:
        path: of the file.
        flags: as of `os.open`. With O_TRUNC the file is emptied only once it is known to be one.
        mode: of a file that O_CREAT makes.
        follow: whether ``path`` may be a symbolic link.

    Raises:
        IsADirectoryError: it is a folder.
        OSError: it cannot be opened, or is neither a file nor a folder; ``strerror`` says what it is.
    """
    if not follow:
        flags |= os.O_NOFOLLOW
    _require_regular(path, _mode_of(path, follow=follow))  # to open a device may already do something
    descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(path: str | PathLike[str]) -> None:
    """Raise as `open_regular` does, for a library that opens ``path`` by itself."""
    os.close(open_regular(path))


def open_binary(path: str | PathLike[str]) -> BufferedReader:
    """``path`` for reading bytes, of whatever size; raises as `open_regular`."""
    return open(path, "rb", opener=open_regular)


def read_bytes(path: str | PathLike[str], max_bytes: int = SETTINGS_BYTES) -> bytes:
    """All of a file.

    Raises:
        OSError: as `open_regular`; or it has more than ``max_bytes``.
    """
    with open_binary(path) as file:
        parts, left = [], max_bytes - os.fstat(file.fileno()).st_size
        if left >= 0:
            left = max_bytes  # a file of /proc has no size before it is read, and a log may grow meanwhile
            while left >= 0 and (part := file.read(min(_READ_BYTES, left + 1))):
                parts.append(part)
                left -= len(part)
    if left < 0:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return b"".join(parts)


def read_text(path: str | PathLike[str], max_bytes: int = SETTINGS_BYTES) -> str:
    """All of a UTF-8 file, with every line ending as a newline.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return StringIO(read_bytes(path, max_bytes).decode(), newline=None).read()


def json_of(text: str | bytes) -> Any:
    """What a line or a file that somebody else wrote holds.

    Raises:
        ValueError: it is no JSON, or nested so deeply that the parser gives up, or has an integer so large that none of
            ours could be: Python would compute with it, until somebody wants a float.
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def toml_of(text: str) -> dict[str, Any]:
    """What a TOML file that somebody else wrote holds.

    Raises:
        ValueError: it is no TOML (`tomllib.TOMLDecodeError`), or has an integer of more than 64 bits, which TOML does
            not promise: it could not even be shown.
        RecursionError: it is nested too deeply.
    """
    found = tomllib.loads(text)
    _require_whole_numbers(found)
    return found


def _require_whole_numbers(value: Any) -> None:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _require_whole_numbers(each)
    elif isinstance(value, int) and value.bit_length() > 64:
        raise ValueError(f"an integer of {value.bit_length()} bits")


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _mode_of(path: str | PathLike[str], *, follow: bool) -> int:
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except FileNotFoundError:
        return stat.S_IFREG  # `os.open` may be told to make it, and else says that it is not there
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL byte", os.fspath(path)) from None


def _require_regular(path: str | PathLike[str], mode: int) -> None:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if kind == stat.S_IFLNK:
        raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path))
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"it is {what}, not a file", os.fspath(path))
