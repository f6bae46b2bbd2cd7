"""Opens files that the user names, or that are in a folder that the user names, without blocking, up to a size limit.

If the name belongs to a FIFO, opening it blocks until somebody writes; reading a terminal blocks until somebody types;
``/dev/zero`` never ends. So files are opened with O_NONBLOCK, and anything but a regular file is refused. The check
uses the open descriptor (`os.fstat`), because the name may lead elsewhere a moment later. A file that is read
completely has a size limit.

All errors are OSErrors whose ``strerror`` says what is wrong, so callers that report unreadable files report these too.
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

SETTINGS_BYTES = 16 << 20  # limit of files that people or their tools write: settings, model and data descriptions
LOG_BYTES = 4 << 30  # limit of files that grow with a run: metrics
_READ_BYTES = 1 << 20
_MOST_DIGITS = 30  # most digits of an integer, with its sign
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666, *, follow: bool = True) -> int:
    """Open the regular file ``path`` without blocking; the caller closes the descriptor. Also an ``opener`` for `open`.

    Args:
        path: path of the file.
        flags: flags of `os.open`. With O_TRUNC the file is emptied only after the check that it is a regular file.
        mode: permissions of a file that O_CREAT makes.
        follow: whether ``path`` may be a symbolic link.

    Raises:
        IsADirectoryError: it is a folder.
        OSError: it cannot be opened, or is neither a file nor a folder; ``strerror`` says what it is.
    """
    if not follow:
        flags |= os.O_NOFOLLOW
    _require_regular(path, _mode_of(path, follow=follow))  # before opening: even opening a device may have an effect
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
    """Raise as `open_regular` does; call it before a library opens ``path`` by itself."""
    os.close(open_regular(path))


def open_binary(path: str | PathLike[str]) -> BufferedReader:
    """Open ``path`` for reading bytes, without a size limit; raises as `open_regular`."""
    return open(path, "rb", opener=open_regular)


def read_bytes(path: str | PathLike[str], max_bytes: int = SETTINGS_BYTES) -> bytes:
    """The contents of a file as bytes.

    Raises:
        OSError: as `open_regular`; or the file has more than ``max_bytes``.
    """
    with open_binary(path) as file:
        parts, left = [], max_bytes - os.fstat(file.fileno()).st_size
        if left >= 0:
            left = max_bytes  # counted while reading: a file in /proc has size 0, and a log may grow meanwhile
            while left >= 0 and (part := file.read(min(_READ_BYTES, left + 1))):
                parts.append(part)
                left -= len(part)
    if left < 0:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return b"".join(parts)


def read_text(path: str | PathLike[str], max_bytes: int = SETTINGS_BYTES) -> str:
    """The contents of a UTF-8 file as text, with all line endings converted to newlines.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return StringIO(read_bytes(path, max_bytes).decode(), newline=None).read()


def json_of(text: str | bytes) -> Any:
    """Parse JSON from an untrusted line or file.

    Raises:
        ValueError: it is not JSON, or nested too deeply for the parser, or has an integer of more than `_MOST_DIGITS`
            digits. None of ours is that large, and Python could not convert it to a float later.
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def toml_of(text: str) -> dict[str, Any]:
    """Parse the text of an untrusted TOML file.

    Raises:
        ValueError: it is not TOML (`tomllib.TOMLDecodeError`), or has an integer of more than 64 bits. TOML does not
            promise those, and Python may not even be able to print them.
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
        return stat.S_IFREG  # `os.open` may create it (O_CREAT), and otherwise raises that it does not exist
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
