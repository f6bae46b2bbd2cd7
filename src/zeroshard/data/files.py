"""Open files by local path or by address in the same way, and fail within seconds if they are unavailable.

A local path is opened by Python, an address (``https://``, ``hf://``, ``s3://`` ...) by fsspec. The first answer of a
server has a short time limit.
"""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from zeroshard.host import regular_files
from zeroshard.host.errors import UserError

Result = TypeVar("Result")

EDGE_BYTES = 1 << 20
ANSWER_S = 10.0  # time limit for the first answer of a server
CONNECT_S, SILENCE_S = 10.0, 60.0  # time limits for connecting, and for a server that stops sending
RETRIES_S = (1.0, 3.0, 9.0)  # waits before each retry of an address that failed
_IO_PACKAGES = ("aiohttp", "httpx", "httpx2", "httpcore", "httpcore2", "huggingface_hub", "fsspec", "pyarrow")
_CODECS = ("zlib", "zstandard", "_lzma")
_HEADERS = {"User-Agent": "zeroshard"}  # some servers refuse Python's default


@dataclass(frozen=True)
class FileFacts:
    """Facts that tell one version of a file from another without reading all of it."""

    path: str  # a local path, or an address
    num_bytes: int  # its size
    identity: str  # a version from the server (ETag or blob id), or the sha256 of size, head and tail


@dataclass(frozen=True)
class Fingerprint:
    """A summary of a corpus's content that distinguishes it from others.

    If there is one file, ``sha256`` is that file's, as ``sha256sum`` prints it. For several files it is the sha256 of
    their own sums in hexadecimal, in order, one per line.
    """

    num_bytes: int
    num_documents: int
    sha256: str


def is_address(path: str) -> bool:
    """Whether ``path`` is an address for fsspec rather than a local path."""
    return "://" in path


def name_of(path: str) -> str:
    """Return the file's name, without the query (``?...``) of an address; raise UserError if it is no address."""
    if not is_address(path):
        return Path(path).name
    try:
        parts = urlsplit(path)
        _ = parts.port  # which raises where there is no number
    except ValueError:  # its message may have a part of the password
        todo = "check it; in a name or password write /, ?, # and @ as %2F, %3F, %23 and %40"
        raise UserError("data.path", f"{path} is no address", todo) from None
    return Path(parts.path).name


def suffix_of(path: str) -> str:
    """Return the last suffix in lower case, without the query (``?...``) of an address."""
    return Path(name_of(path)).suffix.lower()


def open_binary(path: str, *, whole_ranges: bool = False) -> BinaryIO:
    """Open for reading and seeking; ``whole_ranges``: the reader requests exactly the bytes that it needs.

    Raises:
        OSError: it cannot be opened.
        UserError: this kind of address needs a package that is not installed.
    """
    if not is_address(path):
        return regular_files.open_binary(path)
    try:
        filesystem, inner = _filesystem(path)
        options: dict[str, Any] = {"cache_type": "none"} if whole_ranges else {"block_size": 4 * EDGE_BYTES}
        return filesystem.open(inner, "rb", **options)
    except (ImportError, ValueError) as error:  # fsspec: a package for it is missing; no such kind of address
        raise UserError("data.path", f"{path} cannot be opened ({error})", "pip install 'zeroshard[data]'") from None


def facts_of(path: str) -> FileFacts:
    """Return the size and identity of one file.

    Raises:
        UserError: it is missing, empty or unavailable; raised within seconds.
    """
    is_http = path.startswith(("http://", "https://"))
    try:
        version = ""
        if is_address(path):
            filesystem, inner = _filesystem(path)
            info = within(ANSWER_S if is_http else None, lambda: filesystem.info(inner))
            num_bytes = int(info.get("size") or 0)
            version = str(info.get("ETag") or info.get("etag") or info.get("blob_id") or "")
        else:
            num_bytes = Path(path).stat().st_size
        if num_bytes == 0:
            raise UserError("data.path", f"{path} is empty", "leave it out or give a file with text")
        if not version:
            digest = hashlib.sha256(str(num_bytes).encode())
            with open_binary(path) as file:
                digest.update(file.read(EDGE_BYTES))
                if num_bytes > EDGE_BYTES:
                    file.seek(max(EDGE_BYTES, num_bytes - EDGE_BYTES))
                    digest.update(file.read())
            version = digest.hexdigest()
        return FileFacts(path, num_bytes, version)
    except Exception as error:
        if isinstance(error, UserError) or not (is_io(error) or isinstance(error, ImportError | ValueError)):
            raise
        if is_http:
            reason = reason_of(
                error.__cause__ or error
            )  # fsspec calls each failure a missing file, and gives its cause
            raise UserError(
                "data.path", f"{path} cannot be had ({reason})", "check the address and the network"
            ) from None
        if isinstance(error, FileNotFoundError):
            raise UserError("data.path", f"{path} does not exist", "check the path") from None
        raise UserError("data.path", f"{path} cannot be read ({reason_of(error)})", "check the path") from None


def within(seconds: float | None, ask: Callable[[], Result]) -> Result:
    """Return what ``ask`` returns, or raise what it raises; TimeoutError after ``seconds``, in which it goes on.

    For calls without a time limit of their own: a DNS lookup has none, and neither has tiktoken's download.
    """
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001 -- raised by the caller
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(seconds)


def patiently(read: Callable[[], Result], path: str, todo: str) -> Result:
    """Return the result of ``read``; if ``path`` is an address, retry after a failure, each time from the beginning.

    Raises:
        UserError: an address failed after all retries, or a local file failed once.
    """
    for wait_s in (*RETRIES_S, None):
        try:
            return read()
        except Exception as error:
            if not is_io(error):
                raise
            if wait_s is None or not is_address(path):
                raise _failed(path, error, todo) from None
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def in_one_line(path: str) -> Generator[None]:
    """Raise UserError for a file or a connection that fails in this block, which reads ``path``."""
    try:
        yield
    except Exception as error:
        if not is_io(error):
            raise
        raise _failed(path, error, "try again") from None


def _failed(path: str, error: Exception, todo: str) -> UserError:
    if _is_damage(error):
        todo = "the file is damaged, or no such archive: fetch or write it again"
    return UserError("data", f"{path} failed ({reason_of(error)})", todo)


def require_package(name: str, what: str) -> None:
    """Check that an optional package is installed; ``what`` names the feature that needs it."""
    if find_spec(name) is None:
        raise UserError("data", f"{what} needs the package {name}", "pip install 'zeroshard[data]'")


def is_io(error: Exception) -> bool:
    """Whether the error means that a file or a connection failed; fsspec and others have their own classes for that."""
    return isinstance(error, OSError) or _package_of(error) in _IO_PACKAGES or _is_damage(error)


def _is_damage(error: Exception) -> bool:
    """Whether an archive could not be unpacked."""
    return isinstance(error, EOFError | gzip.BadGzipFile) or _package_of(error) in _CODECS


def _package_of(error: Exception) -> str:
    return type(error).__module__.partition(".")[0]


def _filesystem(path: str) -> tuple[Any, str]:
    import fsspec

    options: dict[str, Any] = {}
    if path.startswith(("http://", "https://")):
        require_package("aiohttp", "an address over HTTP")
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        options = {"client_kwargs": {"timeout": limits, "headers": _HEADERS}}
    return fsspec.core.url_to_fs(path, **options)


def reason_of(error: BaseException) -> str:
    """Return why a file or a connection failed, in one line and without the address."""
    reason = getattr(error, "message", None) or getattr(error, "strerror", None) or error
    status = getattr(error, "status", None)  # aiohttp's
    told = " ".join((f"{status} {reason}" if isinstance(status, int) else str(reason)).split())
    return told or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))
