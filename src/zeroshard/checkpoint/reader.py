"""Read a checkpoint by interval: only the requested bytes are read from the disk, to where they are wanted."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import DAMAGED_TODO, Manifest, TensorEntry
from zeroshard.checkpoint.reshard import Interval, plan_copies
from zeroshard.checkpoint.store import TORCH_DTYPES
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import open_binary

MOST_OPEN = 64  # files of a checkpoint, which has one of each rank that wrote it; a process may open about a thousand


class CheckpointReader:
    """A `ShardReader` over a checkpoint's files: it opens a file when a slice of it is needed, and reads that slice.

    Use it as a context manager. It does not verify content (see `verify`), but it checks a file's size when it opens
    the file. It maps none: pages of a map stay resident, all of the checkpoint at the end of a load.

    Attributes:
        param_groups: the saved param groups; empty if the one that loads keeps its own ``settings``.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, settings: bool = True) -> None:
        self._folder, self._manifest = folder, manifest
        self.param_groups: Sequence[Mapping[str, Any]] = manifest.param_groups if settings else ()
        self._tensors: dict[str, dict[str, TensorEntry]] = {}
        self._opened: dict[str, BufferedReader] = {}  # the one used longest ago first
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
            self._open(entry.pieces[copy.piece].file)  # fail on a missing file before allocating memory
        target = torch.empty(interval[1] - interval[0], dtype=TORCH_DTYPES[entry.dtype])
        target_bytes, size = memoryview(target.view(torch.uint8).numpy()), target.element_size()
        for copy in copies:
            piece = entry.pieces[copy.piece]
            into = target_bytes[copy.target_offset * size :][: copy.length * size]
            self._read(piece.file, piece.offset + copy.source_offset * size, into)
        return target

    def _read(self, file: str, at: int, into: memoryview) -> None:
        opened = self._open(file)
        try:
            while into:
                got = os.preadv(opened.fileno(), [into], at)
                if not got:
                    raise UserError(str(self._folder / file), f"is damaged: it ends at byte {at}", DAMAGED_TODO)
                into, at = into[got:], at + got
        except OSError as error:
            raise UserError(str(self._folder / file), f"cannot be read ({error.strerror})", DAMAGED_TODO) from None

    def _open(self, file: str) -> BufferedReader:
        opened = self._opened.pop(file, None)
        if opened is None:
            path, expected = self._folder / file, self._manifest.files[file].num_bytes
            try:
                opened = open_binary(path)
                if os.fstat(opened.fileno()).st_size != expected:
                    opened.close()
                    raise UserError(str(path), f"is damaged: it has not its {expected} bytes", DAMAGED_TODO)
            except OSError as error:
                raise UserError(str(path), f"cannot be read ({error.strerror})", DAMAGED_TODO) from None
            if len(self._opened) == MOST_OPEN:
                self._opened.pop(next(iter(self._opened))).close()
        self._opened[file] = opened
        return opened

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
