"""Read a checkpoint by interval, through memory maps: only the requested bytes are read from the disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import DAMAGED_TODO, Manifest, TensorEntry
from zeroshard.checkpoint.reshard import Interval, plan_copies
from zeroshard.checkpoint.store import TORCH_DTYPES
from zeroshard.errors import UserError
from zeroshard.regular_files import open_binary


class CheckpointReader:
    """A `ShardReader` over a checkpoint's files: it maps a file when a slice of it is needed, and copies that slice.

    Use it as a context manager. It does not verify content (see `verify`), but it checks a file's size when it maps the
    file, because a read beyond the end of a mapped file kills the process.

    Attributes:
        param_groups: the saved param groups; empty if the one that loads keeps its own ``settings``.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, settings: bool = True) -> None:
        self._folder, self._manifest = folder, manifest
        self.param_groups: Sequence[Mapping[str, Any]] = manifest.param_groups if settings else ()
        self._tensors: dict[str, dict[str, TensorEntry]] = {}
        self._maps: dict[str, mmap.mmap] = {}
        for entry in manifest.tensors:
            self._tensors.setdefault(entry.name, {})[entry.kind] = entry

    def names(self) -> tuple[str, ...]:
        """Names of all saved tensors."""
        return tuple(self._tensors)

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Return every saved kind of ``name`` with the unsharded tensor's shape; empty if nothing was saved."""
        return {kind: entry.shape for kind, entry in self._tensors.get(name, {}).items()}

    def read(self, name: str, kind: str, interval: Interval) -> Tensor:
        """Return elements ``[start, stop)`` of the flattened tensor: 1-D, on the CPU, of the saved dtype; a copy.

        Raises:
            ValueError: the interval reaches outside of the tensor.
            UserError: nothing was saved under ``(name, kind)``, a file is missing, or its size is not the one in the
                manifest.
        """
        entry = self._tensors.get(name, {}).get(kind)
        if entry is None:
            what = f"the checkpoint has no {kind} of it"
            raise UserError(name, what, "load it into the model and the optimizer that it was saved from")
        copies = plan_copies([piece.interval for piece in entry.pieces], interval)
        for copy in copies:
            self._map(entry.pieces[copy.piece].file)  # fail on a missing file before allocating memory
        target = torch.empty(interval[1] - interval[0], dtype=TORCH_DTYPES[entry.dtype])
        target_bytes, size = target.view(torch.uint8), target.element_size()
        for copy in copies:
            piece = entry.pieces[copy.piece]
            begin, count = piece.offset + copy.source_offset * size, copy.length * size
            # Bytes, not elements: a piece need not be aligned for its dtype.
            saved = torch.frombuffer(self._map(piece.file), dtype=torch.uint8, offset=begin, count=count)
            target_bytes[copy.target_offset * size :][:count] = saved
        return target

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            path, expected = self._folder / file, self._manifest.files[file].num_bytes
            try:
                with open_binary(path) as opened:
                    if os.fstat(opened.fileno()).st_size != expected:
                        raise UserError(str(path), f"is damaged: it has not its {expected} bytes", DAMAGED_TODO)
                    # A private (copy-on-write) map that is never written: torch warns about read-only memory.
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise UserError(str(path), f"cannot be read ({error.strerror})", DAMAGED_TODO) from None
        return self._maps[file]

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._maps.clear()  # a file is unmapped when the last tensor that views it is gone
