"""Files by path or address, local or far away: opened alike, and refused within seconds where they cannot be had.

A local path is opened by Python, an address (``https://``, ``hf://``, ``s3://`` ...) by fsspec. Who asks for an address
over HTTP is asked first whether anybody answers: loaders further down would try again and again, and say nothing.
"""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from zeroshard import regular_files
from zeroshard.errors import UserError

Result = TypeVar("Result")

EDGE_BYTES = 1 << 20
CONNECT_S, SILENCE_S = 10.0, 60.0  # a server that does not let us in; one that lets us wait for bytes
RETRIES_S = (1.0, 3.0, 9.0)  # waits before a file at an address that failed is read again
_IO_PACKAGES = ("aiohttp", "httpx", "httpx2", "httpcore", "httpcore2", "huggingface_hub", "fsspec", "pyarrow")
_CODECS = ("zlib", "zstandard", "_lzma")
_HEADERS = {"User-Agent": "zeroshard"}  # some servers turn Python's own name away


@dataclass(frozen=True)
class FileFacts:
    """What tells a file from another without reading all of it.

    Attributes:
        path: a local path, or an address.
        num_bytes: its size.
        identity: a version that the server vouches for, or the sha256 of size, head and tail.
    """

    path: str
    num_bytes: int
    identity: str


def is_address(path: str) -> bool:
    """Whether ``path`` is one of fsspec's addresses and no local path."""
    return "://" in path


def suffix_of(path: str) -> str:
    """The last suffix in lower case, without what follows a ``?`` in an address."""
    return Path(urlsplit(path).path if is_address(path) else path).suffix.lower()


def open_binary(path: str, *, whole_ranges: bool = False) -> BinaryIO:
    """Open for reading and seeking; ``whole_ranges`` where the reader asks for exactly what it needs.

    Raises:
        OSError: it cannot be opened.
        UserError: its kind of address needs a package that is not installed.
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
    """Size and identity of one file.

    Raises:
        UserError: it is missing, empty or not to be had; within seconds.
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
        return FileFacts(path, num_bytes, version or _edges(path, num_bytes))
    except FileNotFoundError:
        raise UserError("data.path", f"{path} does not exist", "check the path") from None
    except Exception as error:
        if isinstance(error, UserError) or not (_is_io(error) or isinstance(error, ImportError | ValueError)):
            raise
        raise UserError("data.path", f"{path} cannot be read ({_reason(error)})", "check the path") from None


def answers(address: str, field: str, todo: str, *, timeout_s: float = 5.0) -> None:
    """See that a server answers for ``address``, in ``timeout_s`` and a little more.

    Raises:
        UserError: nobody answers, or with a refusal.
    """
    failed: list[BaseException] = []

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD", headers=_HEADERS | _authorization(address))
        try:
            urllib.request.urlopen(request, timeout=timeout_s).close()
        except urllib.error.HTTPError as error:
            if error.code in (405, 501):  # whoever refuses to say only that it is there, is there
                error.close()
            else:
                failed.append(error)
        except (OSError, ValueError) as error:
            failed.append(error)

    # In a thread, because looking up a name has no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s + 2)
    if thread.is_alive():
        raise UserError(field, f"{address} does not answer within {timeout_s:g} s", todo)
    if failed:
        if isinstance(failed[0], urllib.error.HTTPError):
            failed[0].close()  # it is the response as well, and holds its socket
        raise UserError(field, f"{address} cannot be had ({_reason(failed[0])})", todo)


def patiently(read: Callable[[], Result], path: str, todo: str) -> Result:
    """What ``read`` returns; at an address it is called again after a failure, from its beginning.

    Raises:
        UserError: it failed once too often, or once where nothing else can be expected.
    """
    for wait_s in (*RETRIES_S, None):
        try:
            return read()
        except Exception as error:
            if not _is_io(error):
                raise
            if wait_s is None or not is_address(path):
                if _is_damage(error):
                    todo = "the file is damaged, or no such archive: fetch or write it again"
                raise UserError("data", f"{path} failed ({_reason(error)})", todo) from None
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def require_package(name: str, what: str) -> None:
    """See that an optional package is installed; ``what`` needs it."""
    if find_spec(name) is None:
        raise UserError("data", f"{what} needs the package {name}", "pip install 'zeroshard[data]'")


def _is_io(error: Exception) -> bool:
    """Whether a file or a connection failed; libraries between us and it have errors of their own for that."""
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


def _authorization(address: str) -> dict[str, str]:
    """The user's token, for the hub and nobody else."""
    if find_spec("huggingface_hub") is None:
        return {}
    from huggingface_hub import constants, get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token and address.startswith(constants.ENDPOINT + "/") else {}


def _edges(path: str, num_bytes: int) -> str:
    digest = hashlib.sha256(str(num_bytes).encode())
    with open_binary(path) as file:
        digest.update(file.read(EDGE_BYTES))
        if num_bytes > EDGE_BYTES:
            file.seek(max(EDGE_BYTES, num_bytes - EDGE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    status = getattr(error, "code", None)
    return " ".join(f"{status} {reason}".split() if isinstance(status, int) else str(reason).split()) or repr(error)
