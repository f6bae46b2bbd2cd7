"""Prefetch pages of memory-mapped files: the kernel gets all rows of a batch, and reads them at the same time.

Without this, a page that is not in memory is read when it is first touched, one page after another, and the reader
waits for each. Rows of a shuffled corpus lie anywhere, so for a corpus larger than memory nearly every row is such a
wait. If the pages are in memory already, the advice costs about a microsecond per row.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WILL_NEED = getattr(mmap, "MADV_WILLNEED", None)  # None if the system has no madvise


class MappedPages:
    """The memory-mapped pages of an array; does nothing for an array that is not a mapped file.

    Args:
        array: contiguous.
    """

    def __init__(self, array: np.ndarray) -> None:
        pages = getattr(array, "_mmap", None) if isinstance(array, np.memmap) else None
        self._pages: Any = pages if _WILL_NEED is not None else None
        self._begin = 0 if pages is None else _address(array) - _address(np.frombuffer(pages, np.uint8))
        self._num_bytes = 0 if pages is None else len(pages)

    def read_ahead(self, starts_bytes: NDArray[np.int64], num_bytes: NDArray[np.int64]) -> None:
        """Ask the kernel to fetch ``num_bytes`` of the array from each of ``starts_bytes``, [n]; returns at once."""
        if self._pages is None or _WILL_NEED is None:
            return
        begins = starts_bytes + self._begin
        ends = np.minimum(begins + num_bytes, self._num_bytes)
        begins -= begins % mmap.PAGESIZE
        with suppress(OSError):  # only advice: if something is wrong, reading reports it
            for begin, length in zip(begins.tolist(), (ends - begins).tolist(), strict=True):
                self._pages.madvise(_WILL_NEED, begin, length)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
