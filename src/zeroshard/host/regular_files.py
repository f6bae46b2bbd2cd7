"""Opens files that the user names, or that are in a folder that the user names, without blocking, up to a size limit.

If the name belongs to a FIFO, opening it blocks until somebody writes; reading a terminal blocks until somebody types;
``/dev/zero`` never ends. So files are opened with O_NONBLOCK, and anything but a regular file is refused. The check
uses the open descriptor (`os.fstat`), because the name may lead elsewhere a moment later. A file that is read
completely has a size limit.

[Note: Inside a folder]
    A run folder may come from elsewhere, with symbolic links in it that lead out of it: whoever opened them would write
    over the user's own files, or publish them. So what writes into a folder opens its files by `open_inside`,
    `write_inside` and `folder_inside`: from the folder's descriptor on, each name with O_NOFOLLOW. The folder itself
    may be a link, as that is its user's.

All errors are OSErrors whose ``strerror`` says what is wrong, so callers that report unreadable files report these too.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import tomllib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader, StringIO
from os import PathLike
from pathlib import Path
from typing import Any

SETTINGS_BYTES = 16 << 20  # limit of files that people or their tools write: settings, model and data descriptions
LOG_BYTES = 4 << 30  # limit of files that grow with a run: metrics
_COPY_BYTES = 1 << 30  # limit of a file that is copied: of a tokenizer, or of text about a model
_READ_BYTES = 1 << 20
_MOST_DIGITS = 30  # most digits of an integer, with its sign
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(
    path: str | PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    *,
    follow: bool = True,
    within: int | None = None,
) -> int:
    """Open the regular file ``path`` without blocking; the caller closes the descriptor. Also an ``opener`` for `open`.

    Args:
        flags: flags of `os.open`. With O_TRUNC the file is emptied only after the check that it is a regular file.
        mode: permissions of a file that O_CREAT makes.
        follow: whether ``path`` may be a symbolic link.
        within: descriptor of the folder in which ``path`` lies; None: as the process sees it.

    Raises:
        IsADirectoryError: it is a folder.
        OSError: it cannot be opened, or is neither a file nor a folder; ``strerror`` says what it is.
    """
    if not follow:
        flags |= os.O_NOFOLLOW
    # before opening: even opening a device may have an effect
    _require_regular(path, _mode_of(path, follow=follow, within=within))
    flags_now = (flags & ~os.O_TRUNC) | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags_now, mode, dir_fd=within)
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


def open_inside(folder: str | PathLike[str], name: str | PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open the regular file ``name`` in ``folder`` through no symbolic link below it: [Note: Inside a folder].

    Args:
        name: path of the file in it; with O_CREAT the folders on the way are made.
        flags: as for `open_regular`, which also says what is raised.
    """
    path = Path(folder, name)
    with _entered(folder, Path(name).parent, make=bool(flags & os.O_CREAT)) as within, _named(path):
        return open_regular(path.name, flags, follow=False, within=within)


def is_same(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is the open file or folder; False if there is none, or the descriptor is -1."""
    try:
        return descriptor >= 0 and os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def folder_inside(folder: str | PathLike[str], name: str | PathLike[str]) -> Path:
    """Make the folder ``name`` in ``folder``, if it is not there, through no symbolic link below; return its path.

    Raises:
        OSError: a part of ``name`` is a symbolic link or a file, or cannot be made.
    """
    with _entered(folder, Path(name), make=True):
        return Path(folder, name)


def write_inside(folder: str | PathLike[str], name: str | PathLike[str], content: str | bytes) -> None:
    """Write the file ``name`` in ``folder``, complete or not at all; what has the name, also a link, is replaced.

    Raises:
        OSError: the disk is full or fails, or as `folder_inside`.
    """
    path = Path(folder, name)
    draft = f".{path.name}.{secrets.token_hex(4)}.tmp"  # another process may write the same file
    data = memoryview(content.encode() if isinstance(content, str) else content)
    with _entered(folder, Path(name).parent, make=True) as within, _named(path):
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=within)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
            os.replace(draft, path.name, src_dir_fd=within, dst_dir_fd=within)
        except BaseException:
            os.unlink(draft, dir_fd=within)
            raise
        finally:
            os.close(descriptor)


def copy_inside(source: Path, folder: Path, *, follow: bool = True) -> None:
    """Copy a file into ``folder`` as `write_inside` does; ``follow``: whether ``source`` may be a symbolic link."""
    write_inside(folder, source.name, read_bytes(source, _COPY_BYTES, follow=follow))


def link_in(folder: Path, *, deep: bool = True) -> Path | None:
    """The first symbolic link among ``folder`` and, if ``deep``, what lies directly in it; None if there is none."""
    inner = sorted(folder.iterdir()) if deep and folder.is_dir() and not folder.is_symlink() else []
    return next((path for path in (folder, *inner) if path.is_symlink()), None)


@contextmanager
def _entered(folder: str | PathLike[str], below: Path, *, make: bool) -> Generator[int]:
    """Yield a descriptor of the folder ``below`` in ``folder``, which is reached through no link below ``folder``."""
    assert ".." not in below.parts, f"{below} leads out of {folder}"
    path, flags = Path(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        for part in below.parts:
            path /= part
            with _named(path):
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                if stat.S_ISLNK(_mode_of(part, follow=False, within=descriptor)):
                    raise _is_link(path)
                inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: Path) -> Generator[None]:
    """Give an OSError of the block, which knows the last part of a path alone, the ``path`` itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _is_link(path: str | PathLike[str]) -> OSError:
    return OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path))


def open_binary(path: str | PathLike[str], *, follow: bool = True) -> BufferedReader:
    """Open ``path`` for reading bytes, without a size limit; ``follow`` and errors as of `open_regular`."""
    return open(path, "rb", opener=partial(open_regular, follow=follow))


def read_bytes(path: str | PathLike[str], max_bytes: int = SETTINGS_BYTES, *, follow: bool = True) -> bytes:
    """The contents of a file as bytes.

    Raises:
        OSError: as `open_regular`; or the file has more than ``max_bytes``.
    """
    with open_binary(path, follow=follow) as file:
        parts, left = [], max_bytes - os.fstat(file.fileno()).st_size
        if left >= 0:
            left = max_bytes  # counted while reading: a file in /proc has size 0, and a log may grow meanwhile
            while left >= 0 and (part := file.read(min(_READ_BYTES, left + 1))):
                parts.append(part)
                left -= len(part)
    if left < 0:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return b"".join(parts)


def read_text(path: str | PathLike[str], max_bytes: int = SETTINGS_BYTES, *, follow: bool = True) -> str:
    """The contents of a UTF-8 file as text, with all line endings converted to newlines.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return StringIO(read_bytes(path, max_bytes, follow=follow).decode(), newline=None).read()


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


def _mode_of(path: str | PathLike[str], *, follow: bool, within: int | None = None) -> int:
    try:
        return os.stat(path, follow_symlinks=follow, dir_fd=within).st_mode
    except FileNotFoundError:
        return stat.S_IFREG  # `os.open` may create it (O_CREAT), and otherwise raises that it does not exist
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL byte", os.fspath(path)) from None


def _require_regular(path: str | PathLike[str], mode: int) -> None:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if kind == stat.S_IFLNK:
        raise _is_link(path)
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"it is {what}, not a file", os.fspath(path))


def flush(path: Path) -> None:
    """Block until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
