"""A checkpoint's files on disk: written and hashed in one pass, in folders that appear complete or not at all.

A checkpoint is built in a temporary folder beside its final place (``.NAME.tmp``), flushed to the disk, and renamed. If
the name is taken, the old folder is first renamed to ``.NAME.old`` and is deleted last. So a process that is killed at
any moment leaves one complete checkpoint, which `resolve` finds. Deletion renames a folder to ``.NAME.tmp`` first, so a
folder that is partly deleted is never taken for complete, and the next deletion removes it.

Files are plain safetensors (https://github.com/huggingface/safetensors, "Format"): eight bytes of header length, a JSON
header, the tensors' bytes. Any safetensors reader reads them. We write them ourselves for two reasons: we hash the
bytes on their way to the disk, and our tensors are views of one flat buffer, which we write without a copy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock

import torch
import xxhash
from torch import Tensor

from zeroshard.checkpoint.manifest import MANIFEST, FileEntry
from zeroshard.host.regular_files import flush, open_regular

CHUNK_BYTES = 1 << 22
FLUSH_BYTES = 1 << 30  # written bytes after which the file is flushed

Reading = Callable[[Tensor], AbstractContextManager[Tensor]]

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """A file that was written: its size and header checksum, and for each tensor's key its offset and hash."""

    file: FileEntry
    pieces: dict[str, tuple[int, str]]  # key -> offset, xxh128


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    progress: Callable[[int], None] = lambda num_bytes: None,
    reading: Reading = nullcontext,
) -> Written:
    """Write 1-D tensors as one safetensors file, and flush it to the disk.

    Tensors are hashed and written by as many threads as torch uses for computation (at most four), because one thread
    does not keep a disk busy. Each thread copies at most one tensor at a time to the CPU, if it lies on another device.

    Args:
        progress: called with the number of bytes after each chunk of some MiB, and with 0 after each flush; called from
            several threads.
        reading: a context manager entered around the reading of each tensor; it yields the tensor to write. Called from
            several threads.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
        ValueError: the format has no name for a tensor's dtype.
    """
    head = _head(tensors)
    starts = _starts(len(head), tensors)
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, follow=False)
    try:
        _write_at(descriptor, memoryview(head), 0)
        unflushed, lock = [0], Lock()

        def wrote(num_bytes: int) -> None:
            """Flush when it is due: one flush of all could take minutes, as if the disk hung."""
            with lock:
                unflushed[0] += num_bytes
                if is_due := unflushed[0] >= FLUSH_BYTES:
                    unflushed[0] = 0
            progress(num_bytes)
            if is_due:
                os.fsync(descriptor)
                progress(0)

        def write(key: str) -> str:
            with reading(tensors[key]) as tensor:
                return _write_hashed(descriptor, tensor, starts[key], wrote)

        with ThreadPoolExecutor(num_threads(), "checkpoint-write") as pool:
            digests = list(pool.map(write, tensors))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    num_bytes = len(head) + sum(tensor.nbytes for tensor in tensors.values())
    entry = FileEntry(num_bytes, len(head), xxhash.xxh3_128(head).hexdigest())
    return Written(entry, {key: (starts[key], digest) for key, digest in zip(tensors, digests, strict=True)})


def _head(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a safetensors file with these 1-D tensors."""
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{key}: a checkpoint cannot hold {tensor.dtype}; keep a buffer out of it by persistent=False, or keep "
                "the tensor as another dtype (torch.view_as_real)"
            )
    return header_of((key, tensor.dtype, [tensor.numel()]) for key, tensor in tensors.items())


def header_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] = {}) -> bytes:
    """Return the header of a safetensors file, preceded by its 8-byte length.

    Args:
        tensors: key, dtype and shape of each tensor, in the order in which their bytes follow.
        metadata: what else the header says.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, dtype, shape in tensors:
        end = offset + prod(shape) * dtype.itemsize
        header[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the format wants the data aligned
    return len(head).to_bytes(8, "little") + head


def begin(path: Path) -> Path:
    """Create the empty temporary folder beside ``path``, after clearing what an interrupted save left there."""
    target, aside = temporary(path), _aside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if (aside / MANIFEST).is_file() and not (path / MANIFEST).is_file():
        remove(path)
        aside.rename(path)  # a save was killed between its two renames: undo the first
    remove(aside)
    remove(target)
    target.mkdir()
    return target


def commit(path: Path) -> None:
    """Rename the temporary folder to ``path``, replacing a checkpoint that is there."""
    target, aside = temporary(path), _aside(path)
    flush(target)
    if os.path.lexists(path):
        path.rename(aside)
    target.rename(path)
    flush(path.parent)
    remove(aside)


def remove(path: Path) -> None:
    """Delete a checkpoint's folder, its manifest first; do nothing if it does not exist."""
    if path.is_symlink():  # what it leads to is not ours
        path.unlink()
    elif path.exists():
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def remove_named(path: Path) -> None:
    """Delete the checkpoint called ``path``, in whichever folder it lies (``path`` or ``.NAME.old``).

    It first gets the name of an unfinished save: if this process is killed meanwhile, what is left is deleted as such.
    """
    for folder in (_aside(path), path):
        if os.path.lexists(folder):
            remove(temporary(path))
            folder.rename(temporary(path))
    remove(temporary(path))


def temporary(path: Path) -> Path:
    """Return the temporary folder in which ``path`` is built before the rename."""
    return path.parent / f".{path.name}.tmp"


def resolve(path: Path) -> Path | None:
    """Return the folder that holds the complete checkpoint called ``path``; None if there is none."""
    for folder in (path, _aside(path)):
        if (folder / MANIFEST).is_file():
            return folder
    return None


def num_threads() -> int:
    """Return how many threads may hash at once in this process: as many as torch uses, at most four."""
    return max(1, min(4, torch.get_num_threads()))


def _starts(first: int, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    starts: dict[str, int] = {}
    for key, tensor in tensors.items():
        starts[key] = first
        first += tensor.nbytes
    return starts


def _write_hashed(descriptor: int, tensor: Tensor, offset: int, progress: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_128()
    on_host = tensor.detach().to("cpu").contiguous()
    whole = memoryview(on_host.view(torch.uint8).numpy())
    for start in range(0, len(whole), CHUNK_BYTES):
        chunk = whole[start : start + CHUNK_BYTES]
        digest.update(chunk)
        _write_at(descriptor, chunk, offset + start)
        progress(len(chunk))
    return digest.hexdigest()


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)  # may write less: a full disk, a size limit
        content, offset = content[written:], offset + written


def _aside(path: Path) -> Path:
    return path.parent / f".{path.name}.old"
