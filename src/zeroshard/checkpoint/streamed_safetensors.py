"""Write a safetensors file incrementally: its header needs only shapes, so each tensor is made when its turn comes.

Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.checkpoint.store import header_of
from zeroshard.host.errors import UserError

CHUNK_NUMEL = 1 << 20


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor whose elements are made only when they are written."""

    name: str  # its key in the file
    dtype: torch.dtype  # the dtype of its elements in the file
    shape: tuple[int, ...]  # shape of the complete tensor
    parts: Callable[[], Iterable[Tensor]]  # makes its elements in order, as tensors of any shape and dtype

    @property
    def num_bytes(self) -> int:
        """Size in the file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def write_streamed(path: Path, tensors: Sequence[StreamedTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file and flush it to the disk; only one part at a time is in memory.

    Raises:
        ValueError: the parts of a tensor have more or fewer elements than its shape says.
        OSError: the disk failed or is full.
    """
    with path.open("wb") as file:
        file.write(header_of(((each.name, each.dtype, each.shape) for each in tensors), metadata or {}))
        for tensor in tensors:
            written = 0
            for part in tensor.parts():
                content = part.detach().to("cpu", tensor.dtype).contiguous().view(-1)
                written += content.numel()
                file.write(memoryview(content.view(torch.uint8).numpy()))
            if written != prod(tensor.shape):
                raise ValueError(f"{tensor.name}: {written} elements came for shape {list(tensor.shape)}")
        file.flush()
        os.fsync(file.fileno())


def intervals(numel: int) -> Iterator[tuple[int, int]]:
    """Cut ``[0, numel)`` into intervals of a few megabytes."""
    for start in range(0, numel, CHUNK_NUMEL):
        yield start, min(start + CHUNK_NUMEL, numel)


@contextmanager
def drafted(out: Path) -> Generator[Path]:
    """Yield a hidden folder beside ``out``, which is renamed to ``out`` if the block succeeds, and otherwise deleted.

    Raises:
        UserError: ``out`` is not empty, or the folder cannot be made.
    """
    require_new(out)
    draft = out.absolute().parent / f".{out.name}.tmp"
    try:
        shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
        draft.mkdir(parents=True)
        if out.exists():
            out.rmdir()  # empty: the rename needs the name to be free
    except OSError as error:
        what = f"{out} cannot be written ({error.strerror})"
        raise UserError("out", what, "choose a folder that you may write") from None
    try:
        yield draft
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def require_new(out: Path) -> None:
    """Raise UserError if the folder that is to be written exists and is not empty, or is a file."""
    if out.name in ("", "..") or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UserError("out", f"{out} is there already", "name a new folder")
