"""Checksums of the blocks of token files: a damaged block is noticed when a run first reads it.

    DIR/train/tokens-00000.bin   | block 0 | block 1 | ... | the rest |      blocks of `BLOCK_BYTES`, anew in each file
    DIR/train/blocks.bin         a little-endian uint64 for each block of each file, in order: its XXH3-64

A file's sha256 would have to read all of it before the first step. A block is read as a whole when a row first touches
it, and each block once in a run: `MappedBlocks` keeps a bit per block. XXH3 (https://xxhash.com) is as fast as memory;
the hash finds accidents, and not what somebody forges, who could write blocks.bin too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from zeroshard.data.mapped_pages import MappedPages
from zeroshard.host.errors import UserError

# A row of a shuffled corpus reads its blocks: larger ones cost more for it, smaller ones hash slower.
BLOCK_BYTES = 1 << 16
SUM = np.dtype("<u8")


class BlockSums:
    """Hashes the blocks of one file, given its content in pieces of any size."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._hash, self._room = xxhash.xxh3_64(), BLOCK_BYTES

    def update(self, data: bytes) -> None:
        """Continue with the next bytes of the file."""
        left = memoryview(data)
        while left:
            self._hash.update(left[: self._room])
            taken = min(self._room, len(left))
            left, self._room = left[taken:], self._room - taken
            if not self._room:
                self._end_block()

    def finish(self) -> list[int]:
        """Return the sums of all blocks; the last block may be a part of one."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        return self._sums

    def _end_block(self) -> None:
        self._sums.append(self._hash.intdigest())
        self._hash, self._room = xxhash.xxh3_64(), BLOCK_BYTES


class MappedBlocks:
    """The blocks of one mapped file, each compared with its sum when it is first read.

    Args:
        path: the file, for error messages.
        content: the file, mapped; any dtype.
        sums: the sums of its blocks, [num_blocks].
        block_bytes: bytes of a block.
    """

    def __init__(self, path: Path, content: np.memmap, sums: NDArray, block_bytes: int) -> None:
        self._path, self._sums, self._block_bytes = path, sums, block_bytes
        self._pages, self._itemsize = MappedPages(content), content.itemsize
        self._bytes = np.asarray(content).view(np.uint8).data
        self._unseen = np.ones(sums.size, bool)
        self._num_unseen = sums.size

    def check(self, starts: NDArray[np.int64], length: int) -> None:
        """Check the blocks of ``length`` items from each of ``starts``, [n], that were not checked before.

        Raises:
            UserError: a block is damaged.
        """
        if not self._num_unseen or not starts.size or not length:
            return
        first = starts * self._itemsize // self._block_bytes
        last = ((starts + length) * self._itemsize - 1) // self._block_bytes
        touched = first[:, None] + np.arange(int((last - first).max()) + 1)
        touched = np.minimum(touched, last[:, None])
        new = np.unique(touched[self._unseen[touched]])
        self._pages.read_ahead(new * self._block_bytes, np.full(new.size, self._block_bytes))
        for block in new.tolist():
            begin = block * self._block_bytes
            if xxhash.xxh3_64_intdigest(self._bytes[begin : begin + self._block_bytes]) != int(self._sums[block]):
                what = f"{self._path} is damaged: bytes from {begin:,} on are not those that were written"
                raise UserError("data.dir", what, "delete the folder and prepare it again")
        self._unseen[new] = False
        self._num_unseen -= new.size


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a file."""
    return -(-num_bytes // block_bytes)
