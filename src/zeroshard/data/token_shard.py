"""One file of token ids: its pages are fetched ahead, and each of its blocks is checked when it is first read.

    DIR/train/tokens-00000.bin   | block 0 | block 1 | ... | the rest |      blocks of `BLOCK_BYTES`, anew in each file
    DIR/train/blocks.bin         a little-endian uint64 for each block of each file, in order: its XXH3-64

*Pages.* Rows of a shuffled corpus lie anywhere. Pages that are not in memory are read when they are first touched, one
after another, and the reader waits for each. So the kernel is told of all rows of a batch, and reads them at the same
time. If they are in memory already, the advice costs some microseconds per row.

*Checksums.* A file's sha256 would have to read all of it before the first step. A block is read as a whole when a row
first touches it, and each block once in a run: a shard keeps a bit per block. XXH3 (https://xxhash.com) is as fast as
memory; the hash finds accidents, and not what somebody forges, who could write blocks.bin too.
"""

from __future__ import annotations

import hashlib
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from zeroshard.host.errors import UserError

# A row of a shuffled corpus reads its blocks: larger ones cost more for it, smaller ones hash slower.
BLOCK_BYTES = 1 << 16
SUM = np.dtype("<u8")
_WILL_NEED = getattr(mmap, "MADV_WILLNEED", None)  # None if the system has no madvise


class FileSums:
    """Hashes one file and each of its blocks, given its content in pieces of any size."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._hash, self._room = xxhash.xxh3_64(), BLOCK_BYTES
        self._of_file = hashlib.sha256()

    def update(self, data: bytes) -> None:
        """Continue with the next bytes of the file."""
        self._of_file.update(data)
        left = memoryview(data)
        while left:
            self._hash.update(left[: self._room])
            taken = min(self._room, len(left))
            left, self._room = left[taken:], self._room - taken
            if not self._room:
                self._end_block()

    def finish(self) -> tuple[str, list[int]]:
        """Return the file's sha256, in hexadecimal, and the sums of its blocks; the last may be a part of one."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        return self._of_file.hexdigest(), self._sums

    def _end_block(self) -> None:
        self._sums.append(self._hash.intdigest())
        self._hash, self._room = xxhash.xxh3_64(), BLOCK_BYTES


class TokenShard:
    """Token ids that lie in memory, or in a mapped file.

    Args:
        ids: the ids, 1-D and contiguous; of a memory map the pages are fetched ahead.
        sums: the sums of its blocks, [num_blocks]; empty: nothing is checked.
        path: the file, for error messages.
    """

    def __init__(
        self, ids: NDArray, sums: NDArray | None = None, block_bytes: int = BLOCK_BYTES, path: Path | None = None
    ) -> None:
        self.ids = np.asarray(ids)  # without the memmap subclass, which makes a Python call for every slice
        self._sums, self._block_bytes, self._path = sums, block_bytes, path
        self._unseen = np.ones(0 if sums is None else sums.size, bool)
        pages = getattr(ids, "_mmap", None) if isinstance(ids, np.memmap) and _WILL_NEED is not None else None
        self._pages: Any = pages
        self._begin = 0 if pages is None else _address(ids) - _address(np.frombuffer(pages, np.uint8))

    def read_ahead(self, start: int, length: int) -> None:
        """Ask the kernel to fetch ``length`` ids from ``start``, and the blocks that reading them will check."""
        if self._pages is None or _WILL_NEED is None:
            return
        begin, end = start * self.ids.itemsize, (start + length) * self.ids.itemsize
        blocks = self._blocks(start, length)
        if self._unseen[blocks].any():
            begin, end = blocks.start * self._block_bytes, blocks.stop * self._block_bytes
        end = self._begin + min(end, self.ids.nbytes)
        begin = (self._begin + begin) // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):  # only advice: if something is wrong, reading reports it
            self._pages.madvise(_WILL_NEED, begin, end - begin)

    def read(self, start: int, length: int) -> NDArray:
        """Return a view of the ids from ``start`` on: ``length`` of them, or fewer at the end.

        Raises:
            UserError: one of their blocks is damaged; each is checked once.
        """
        found = self.ids[start : start + length]
        blocks = self._blocks(start, found.size)
        for block in (np.flatnonzero(self._unseen[blocks]) + blocks.start).tolist():
            assert self._sums is not None
            begin = block * self._block_bytes
            content = self.ids.view(np.uint8)[begin : begin + self._block_bytes].data
            if xxhash.xxh3_64_intdigest(content) != int(self._sums[block]):
                what = f"{self._path} is damaged: bytes from {begin:,} on are not those that were written"
                raise UserError("data.dir", what, "delete the folder and prepare it again")
            self._unseen[block] = False
        return found

    def _blocks(self, start: int, length: int) -> slice:
        """Return which blocks ``length`` ids from ``start`` lie in."""
        itemsize = self.ids.itemsize
        return slice(start * itemsize // self._block_bytes, num_blocks((start + length) * itemsize, self._block_bytes))


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a file."""
    return -(-num_bytes // block_bytes)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
