"""A checkpoint on disk: files written and hashed in one pass, folders that appear whole or not at all.

A folder is filled beside its final place (``.NAME.tmp``), flushed to the disk, and renamed. Where the name is
taken, the old folder steps aside first (``.NAME.old``) and is deleted last, so a kill at any moment leaves one
whole checkpoint, which `resolve` finds.

Files are plain safetensors (https://github.com/huggingface/safetensors, "Format"): eight bytes of header length,
a JSON header, the tensors' bytes. We write them here because a hash can then be taken of the bytes on their way to
the disk, and because the tensors are views of one flat buffer, which needs no copy; any safetensors reader reads
them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zeroshard.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry
from zeroshard.checkpoint.reshard import Interval, plan_copies

_CHUNK_BYTES = 1 << 22

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
}
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write 1-D tensors as one safetensors file, flush it to the disk, and return its size and sha256.

    At most one tensor at a time is copied (to the CPU, where it lies elsewhere).
    """
    header: dict[str, object] = {}
    offset = 0
    for key, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [offset, end],
        }
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the format wants the data aligned
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(head).to_bytes(8, "little"), head, *_tensor_bytes(tensors)):
            digest.update(part)
            file.write(part)
        _flush(file.fileno(), file)
    return FileEntry(8 + len(head) + offset, digest.hexdigest())


def write_text(path: Path, text: str) -> None:
    """Write a text file and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        _flush(file.fileno(), file)


def matches(path: Path, expected: FileEntry) -> bool:
    """Whether a file is there, of the expected size, and hashes to the expected sha256."""
    try:
        if path.stat().st_size != expected.num_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256
    except OSError:
        return False


def begin(path: Path) -> Path:
    """Make the empty temporary folder beside ``path``, after clearing what an interrupted save left there."""
    target, aside = temporary(path), _aside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if (aside / MANIFEST).is_file() and not (path / MANIFEST).is_file():
        _remove(path)
        aside.rename(path)  # a save was killed between its two renames: undo the first
    _remove(aside)
    _remove(target)
    target.mkdir()
    return target


def commit(path: Path) -> None:
    """Put the temporary folder in the place of ``path``."""
    target, aside = temporary(path), _aside(path)
    _flush_folder(target)
    if path.exists():
        path.rename(aside)
    target.rename(path)
    _flush_folder(path.parent)
    _remove(aside)


def temporary(path: Path) -> Path:
    """Where ``path`` is built before it takes its name."""
    return path.parent / f".{path.name}.tmp"


def resolve(path: Path) -> Path | None:
    """The folder that holds the complete checkpoint called ``path``; None where there is none."""
    for folder in (path, _aside(path)):
        if (folder / MANIFEST).is_file():
            return folder
    return None


class CheckpointReader:
    """A `ShardReader` over a checkpoint's files: opens a file when a slice of it is wanted, reads that slice.

    Use it as a context manager; it does not verify files (see `matches`).
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._tensors: dict[str, dict[str, TensorEntry]] = {}
        self._files: dict[str, Any] = {}  # safetensors' handles, which have no public type
        for entry in manifest.tensors:
            self._tensors.setdefault(entry.name, {})[entry.kind] = entry

    def names(self) -> tuple[str, ...]:
        """Every saved tensor's name."""
        return tuple(self._tensors)

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Every saved kind of ``name`` with the whole tensor's shape; empty where nothing was saved."""
        return {kind: entry.shape for kind, entry in self._tensors.get(name, {}).items()}

    def read(self, name: str, kind: str, interval: Interval) -> Tensor:
        """The piece ``[start, stop)`` of the flattened tensor: 1-D, on the CPU, of the saved dtype.

        Raises:
            KeyError: nothing was saved under ``(name, kind)``.
            ValueError: the interval reaches outside of the tensor.
        """
        entry = self._tensors[name][kind]
        target = torch.empty(interval[1] - interval[0], dtype=_TORCH_DTYPES[entry.dtype])
        for copy in plan_copies([piece.interval for piece in entry.pieces], interval):
            piece = entry.pieces[copy.piece]
            saved = self._open(piece.file).get_slice(piece.key)
            stop = copy.source_offset + copy.length
            target[copy.target_offset : copy.target_offset + copy.length] = saved[copy.source_offset : stop]
        return target

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt", device="cpu")
        return self._files[file]

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()  # a handle holds the file mapped until it is collected


def _tensor_bytes(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for tensor in tensors.values():
        on_host = tensor.detach().to("cpu").contiguous()
        whole = memoryview(on_host.view(torch.uint8).numpy())
        for start in range(0, len(whole), _CHUNK_BYTES):
            yield whole[start : start + _CHUNK_BYTES]


def _flush(descriptor: int, file: Any) -> None:
    file.flush()
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.parent / f".{path.name}.old"


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
