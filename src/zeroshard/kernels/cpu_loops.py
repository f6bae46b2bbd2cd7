"""Loops in C++ for CPUs: the machine's own compiler makes them once, and the user's cache folder keeps them.

Each of PyTorch's operations is a pass over memory, so an update of thirty operations makes thirty passes. A loop makes
one. Its text is a ``.cpp`` file beside its reference, which is its specification: the two give the same bits. Without a
compiler the reference is used, and one line says so. Compiling takes less than a second; later processes load the file.

A loop is called through `ctypes`, which releases the GIL, with addresses of tensors. It is no operation of torch's, so
tensors on the meta device, and those of subclasses, such as fake ones, go to the reference: `PLAIN`.
"""

from __future__ import annotations

import ctypes
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

from zeroshard.launch.environment import variable

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
            path = folder / f"{name}-{key}.so"
            if path.exists():
                with suppress(OSError):  # made on a system with other libraries
                    return ctypes.CDLL(str(path))
            _compile(text, path, flags)
            return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        written = getattr(error, "stderr", None) or str(error)
        why = written.strip().splitlines()[0] if written.strip() else type(error).__name__
        _log.warning("kernels: %s runs by PyTorch's own operations, many times slower: %s", name, why)
        return None


@contextmanager
def _folder() -> Generator[Path]:
    """The folder of the libraries, locked while one process or thread looks into it; else a temporary one."""
    home = variable("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "zeroshard"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
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


def _compile(text: Path, path: Path, flags: tuple[str, ...]) -> None:
    """Compile ``text`` to ``path``, which is there complete or not at all."""
    found = (shutil.which(each) for each in (variable("CXX"), "g++", "clang++", "c++") if each)
    compiler = next((each for each in found if each), None)
    if compiler is None:
        raise OSError("there is no C++ compiler; install g++ or clang++, or set CXX")
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        command = [compiler, *flags, str(text), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST_S)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
