"""Loops in C++ for CPUs: the machine's own compiler makes them once, and the user's cache folder keeps them.

Each of PyTorch's operations is a pass over memory, so an update of thirty operations makes thirty passes. A loop makes
one. Its text is a ``.cpp`` file beside its reference, which is its specification: the two give the same bits. Without a
compiler the reference is used, and one line says so. Compiling takes less than a second; later processes load the file.

A library runs with the user's rights and decides what is trained. So the folder and the file must be the user's, and
nobody else's to write; and the file's name ends with the digest of its content, so one that was cut, or has one other
bit, is noticed. What is not trusted is made anew.

A loop is called through `ctypes`, which releases the GIL, with addresses of tensors. It is no operation of torch's, so
tensors on the meta device, and those of subclasses, such as fake ones, go to the reference: `PLAIN`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from platform import machine

import torch
from torch import Tensor, nn

from zeroshard.host.launch.environment import variable
from zeroshard.host.regular_files import open_regular

# One rounding for each operation, as in PyTorch. The third and fourth let roots and comparisons become vectors.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FLAGS = (*FLAGS, "-shared", "-fPIC", "-pthread")
VECTORS = {"AVX2": ("-mavx2",), "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")}  # by torch's names
LONGEST_S = 120  # that a compiler may take
PLAIN = (Tensor, nn.Parameter)  # classes of tensors that have an address
_log = logging.getLogger("zeroshard.kernels")


@cache
def loop(name: str) -> ctypes.CDLL | None:
    """Return the library made of ``name.cpp``, compiled now if nobody has done so; None if it cannot be."""
    text, shared = (Path(__file__).with_name(each) for each in (f"{name}.cpp", "cpu_loops.h"))
    flags = (*FLAGS, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), ()))
    # A home may be shared by machines with other processors: each has a file of its own.
    texts = [each.read_text(encoding="utf-8") for each in (text, shared)]
    key = sha256("\0".join([*texts, machine(), *flags]).encode()).hexdigest()[:16]
    try:
        with _folder() as folder:
            for path in folder.glob(f"{name}-{key}-*.so"):
                with suppress(OSError):  # not to be trusted, or made on a system with other libraries
                    return _load(path)
            return _load(_compile(text, folder / f"{name}-{key}", flags))
    except (OSError, subprocess.SubprocessError) as error:
        written = getattr(error, "stderr", None) or str(error)
        why = written.strip().splitlines()[0] if written.strip() else type(error).__name__
        _log.warning("kernels: %s runs by PyTorch's own operations, many times slower: %s", name, why)
        return None


def _load(path: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError: it is not as it was made, or not the user's alone; it is removed if that is possible. Or it cannot be
            loaded on this system.
    """
    with open(open_regular(path, follow=False), "rb") as file:
        what = _not_own(os.fstat(file.fileno()))
        if not what and sha256(file.read()).hexdigest() != path.stem.rpartition("-")[2]:
            what = "was changed after it was made"
    if what:
        with suppress(OSError):
            path.unlink()
        raise OSError(errno.EPERM, what, str(path))
    return ctypes.CDLL(str(path))


def _not_own(found: os.stat_result) -> str:
    """Why a file or folder is not the user's alone; empty if it is."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    return "may be written by other users" if found.st_mode & 0o022 else ""


@contextmanager
def _folder() -> Generator[Path]:
    """The folder of the libraries, locked while one process or thread looks into it; else a temporary one."""
    home = variable("XDG_CACHE_HOME")
    try:
        folder = (Path(home) if home else Path.home() / ".cache") / "zeroshard"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if what := _not_own(folder.stat()):
            _log.warning("kernels: loops are compiled in each process: %s %s; chmod or remove it", folder, what)
            raise OSError(errno.EPERM, what, str(folder))
        file = os.fdopen(open_regular(folder / "lock", os.O_WRONLY | os.O_CREAT, follow=False), "w")
    except (OSError, RuntimeError):  # read-only, or there is no home; a loaded library needs its file no more
        with tempfile.TemporaryDirectory(prefix="zeroshard-") as temporary:
            yield Path(temporary)
        return
    with file:
        with suppress(OSError):  # a file system without locks: two may compile the same
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have the file, too


def _compile(text: Path, stem: Path, flags: tuple[str, ...]) -> Path:
    """Compile ``text`` to a file that begins with ``stem``, which is on the disk complete or not at all; return it."""
    found = (shutil.which(each) for each in (variable("CXX"), "g++", "clang++", "c++") if each)
    compiler = next((each for each in found if each), None)
    if compiler is None:
        raise OSError("there is no C++ compiler; install g++ or clang++, or set CXX")
    part = stem.with_name(f"{stem.name}.{os.getpid()}")
    try:
        command = [compiler, *flags, str(text), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST_S)
        with part.open("rb") as file:
            os.fchmod(file.fileno(), 0o600)
            path = stem.with_name(f"{stem.name}-{sha256(file.read()).hexdigest()}.so")
            os.fsync(file.fileno())  # else a machine that stops may leave the name without the content
        part.replace(path)
        return path
    finally:
        part.unlink(missing_ok=True)
