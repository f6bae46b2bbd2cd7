"""Open files by local path or by address in the same way, and fail within seconds if they are unavailable.

A local path is opened by Python, an address (``https://``, ``hf://``, ``s3://`` ...) by fsspec. For an address over
HTTP we first check that the server answers, because the libraries below us would retry for a long time without a
message.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from zeroshard.host import regular_files
from zeroshard.host.errors import UserError

Result = TypeVar("Result")

EDGE_BYTES = 1 << 20
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
    return Path(_parts(path).path if is_address(path) else path).name


def _parts(address: str) -> SplitResult:
    try:
        parts = urlsplit(address)
        _ = parts.port  # which raises where there is no number
    except ValueError:  # its message may have a part of the password
        todo = "check it; in a name or password write /, ?, # and @ as %2F, %3F, %23 and %40"
        raise UserError("data.path", f"{address} is no address", todo) from None
    return parts


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
    try:
        version = ""
        if is_address(path):
            if path.startswith(("http://", "https://")):
                answers(path, "data.path", "check the address and the network")
            filesystem, inner = _filesystem(path)
            info = filesystem.info(inner)
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
    except FileNotFoundError:
        raise UserError("data.path", f"{path} does not exist", "check the path") from None
    except Exception as error:
        if isinstance(error, UserError) or not (_is_io(error) or isinstance(error, ImportError | ValueError)):
            raise
        raise UserError("data.path", f"{path} cannot be read ({_reason(error)})", "check the path") from None


def answers(address: str, field: str, todo: str, *, timeout_s: float = 5.0) -> None:
    """Check that a server answers for ``address`` within about ``timeout_s``.

    Raises:
        UserError: it does not answer, or it refuses.
    """

    def ask() -> None:
        """Ask for the address; an answer that says that asking so is not allowed is one, too."""
        parts, headers = _parts(address), dict(_HEADERS)
        name, separator, host = parts.netloc.rpartition("@")
        if separator:  # urllib would take name and password for a part of the host's name
            headers["Authorization"] = f"Basic {base64.b64encode(unquote(name).encode()).decode()}"
        if find_spec("huggingface_hub") is not None:
            from huggingface_hub import constants, get_token

            if address.startswith(constants.ENDPOINT + "/") and (token := get_token()):
                headers["Authorization"] = f"Bearer {token}"  # for the hub alone
        bare = parts._replace(netloc=host, fragment="").geturl()
        request = urllib.request.Request(bare, method="HEAD", headers=headers)
        try:
            urllib.request.urlopen(request, timeout=timeout_s).close()
        except urllib.error.HTTPError as error:
            error.close()  # an HTTPError is also the response, and keeps its socket open
            if error.code not in (405, 501):  # the server does not support HEAD, but it answers
                raise

    try:
        within(timeout_s + 2, ask)
    except TimeoutError:
        raise UserError(field, f"{address} does not answer within {timeout_s:g} s", todo) from None
    except (OSError, ValueError) as error:
        raise UserError(field, f"{address} cannot be had ({_reason(error)})", todo) from None


def within(seconds: float, ask: Callable[[], Result]) -> Result:
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
            if not _is_io(error):
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
        if not _is_io(error):
            raise
        raise _failed(path, error, "try again") from None


def _failed(path: str, error: Exception, todo: str) -> UserError:
    if _is_damage(error):
        todo = "the file is damaged, or no such archive: fetch or write it again"
    return UserError("data", f"{path} failed ({_reason(error)})", todo)


def require_package(name: str, what: str) -> None:
    """Check that an optional package is installed; ``what`` names the feature that needs it."""
    if find_spec(name) is None:
        raise UserError("data", f"{what} needs the package {name}", "pip install 'zeroshard[data]'")


def _is_io(error: Exception) -> bool:
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


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    status = getattr(error, "code", None)
    return " ".join(f"{status} {reason}".split() if isinstance(status, int) else str(reason).split()) or repr(error)
