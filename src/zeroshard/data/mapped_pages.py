"""Pages of mapped files that will be read soon: the kernel is told, and fetches them while something else computes.

A page of a mapped file that is not in memory is fetched when it is touched, one after another, and whoever touches it
waits. Rows of a shuffled corpus lie anywhere, so of one larger than memory nearly every row is such a wait. The advice
costs about a microsecond a row where the pages are there.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WILL_NEED = getattr(mmap, "MADV_WILLNEED", None)  # absent where the system takes no advice


class MappedPages:
    """The pages that an array lies in, where it is a mapped file; of any other array none.

    Args:
        array: contiguous.
    """

    def __init__(self, array: np.ndarray) -> None:
        pages = getattr(array, "_mmap", None) if isinstance(array, np.memmap) else None
        self._pages: Any = pages if _WILL_NEED is not None else None
        self._begin = 0 if pages is None else _address(array) - _address(np.frombuffer(pages, np.uint8))
        self._num_bytes = 0 if pages is None else len(pages)

    def read_ahead(self, starts_bytes: NDArray[np.int64], num_bytes: NDArray[np.int64]) -> None:
        """Have the kernel fetch so many bytes of the array from each of these, [n]; returns at once."""
        if self._pages is None or _WILL_NEED is None:
            return
        begins = starts_bytes + self._begin
        ends = np.minimum(begins + num_bytes, self._num_bytes)
        begins -= begins % mmap.PAGESIZE
        with suppress(OSError):  # it is advice: who reads is told what is wrong
            for begin, length in zip(begins.tolist(), (ends - begins).tolist(), strict=True):
                self._pages.madvise(_WILL_NEED, begin, length)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
