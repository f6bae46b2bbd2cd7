"""Token shards: a stream of ids in memory-mapped files, with random access across shard boundaries.

Reading uses only page-cache memory, which the system can reclaim; a batch is a copy of its rows. Writing keeps one
block in memory at a time.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zeroshard.data.meta import BLOCKS, DTYPES, SPLITS, DataMeta, ShardMeta, SplitMeta, read_meta, sha256_of
from zeroshard.data.token_shard import SUM, FileSums, TokenShard, num_blocks
from zeroshard.host.errors import UserError

DEFAULT_SHARD_TOKENS = 100_000_000
_READ_BYTES = 1 << 20


class TokenDataset:
    """One stream of token ids, stored as consecutive pieces.

    Args:
        shards: the pieces, of one unsigned dtype, in order; arrays are 1-D.
    """

    def __init__(self, shards: Sequence[NDArray[np.unsignedinteger] | TokenShard], vocab_size: int) -> None:
        found = [shard if isinstance(shard, TokenShard) else TokenShard(shard) for shard in shards]
        self._shards = [shard for shard in found if shard.ids.size] or [TokenShard(np.empty(0, np.uint16))]
        self._bounds = [0, *accumulate(shard.ids.size for shard in self._shards)]
        self.vocab_size = vocab_size

    @classmethod
    def open(cls, folder: Path | str, split: str = "train") -> TokenDataset:
        """Map the files of one split of a prepared folder; their blocks are checked when they are first read.

        Raises:
            UserError: the folder is not a prepared one, or a file is missing or has another size than ``meta.json``
                gives, or the checksums of its blocks are damaged; the message names the file. Later, when tokens are
                read: their block is damaged.
            ValueError: a split that is neither ``train`` nor ``val``.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        folder, meta = Path(folder), read_meta(Path(folder))
        dtype, sums = DTYPES[meta.dtype], _sums_of(folder, meta, split)
        shards = []
        for shard in meta.splits[split].shards:
            path, num_bytes = folder / shard.file, shard.num_tokens * dtype.itemsize
            check_size(path, num_bytes)
            own, sums = np.split(sums, [num_blocks(num_bytes, meta.block_bytes)])
            shards.append(TokenShard(np.memmap(path, dtype=dtype, mode="r"), own, meta.block_bytes, path))
        return cls(shards, meta.vocab_size)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the stream."""
        return self._bounds[-1]

    def window(self, start: int, length: int) -> NDArray[np.unsignedinteger]:
        """Return a copy of tokens ``[start, start + length)``, [length].

        Raises:
            ValueError: they are outside the stream.
            UserError: a block that is now read for the first time is damaged.
        """
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise ValueError(f"tokens [{start}, {start + length}) are outside [0, {self.num_tokens})")
        out = np.empty(length, self._shards[0].ids.dtype)
        done = 0
        index = bisect_right(self._bounds, start) - 1
        while done < length:
            piece = self._shards[index].read(start + done - self._bounds[index], length - done)
            out[done : done + piece.size] = piece
            done, index = done + piece.size, index + 1
        return out

    def gather(self, starts: ArrayLike, length: int) -> NDArray[np.unsignedinteger]:
        """Return ``[len(starts), length]``: the window at each start, of which the kernel is told of all at once.

        Raises:
            ValueError: a window is not inside the stream.
            UserError: as `window`.
        """
        first = np.asarray(starts, dtype=np.int64)
        if first.size and (first.min() < 0 or first.max() + length > self.num_tokens):
            raise ValueError(f"a window of {length} tokens is outside [0, {self.num_tokens})")
        self.read_ahead(first, length)
        out = np.empty((first.size, length), self._shards[0].ids.dtype)
        for row, start in enumerate(first.tolist()):
            out[row] = self.window(start, length)
        return out

    def read_ahead(self, starts: ArrayLike, lengths: ArrayLike) -> None:
        """Ask the kernel to fetch ``lengths`` tokens from each start, which will be read soon; returns at once."""
        first = np.asarray(starts, dtype=np.int64)
        for start, length in zip(first.tolist(), np.broadcast_to(lengths, first.shape).tolist(), strict=True):
            index = bisect_right(self._bounds, start) - 1
            self._shards[index].read_ahead(start - self._bounds[index], length)  # few windows continue in the next


class TokenWriter:
    """Appends ids to a split's files; opens the next file when one is full.

    Args:
        folder: the prepared folder in the making; files are written to ``folder/split``.
        split: ``train`` or ``val``.
        dtype: a key of `meta.DTYPES`.
        max_tokens: all tokens after so many are dropped; None means no limit.
        num_tokens: valid tokens of an earlier process that wrote with the same arguments; others are deleted.

    Raises:
        UserError: there are fewer tokens than ``num_tokens``.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: str,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        max_tokens: int | None = None,
        *,
        num_tokens: int = 0,
    ) -> None:
        assert shard_tokens >= 1
        self._folder, self._split, self._dtype = folder, split, DTYPES[dtype]
        self._shard_tokens, self._max_tokens = shard_tokens, max_tokens
        self._shards: list[ShardMeta] = []
        self._file = None
        self._room = 0  # tokens that still fit into the open file
        self._open_sums = FileSums()  # of the open file
        self._sums: list[int] = []  # of the blocks of all earlier files
        self.num_tokens = 0
        (folder / split).mkdir(parents=True, exist_ok=True)
        self._keep(num_tokens)

    def close(self) -> None:
        """Close the open file, however the preparation ended."""
        if self._file is not None:
            self._file.close()

    @property
    def is_full(self) -> bool:
        """Whether ``max_tokens`` tokens have been written."""
        return self._max_tokens is not None and self.num_tokens >= self._max_tokens

    def write(self, ids: NDArray[np.integer]) -> None:
        """Append ids, [n], of any integer dtype."""
        if self._max_tokens is not None:
            ids = ids[: self._max_tokens - self.num_tokens]
        while ids.size:
            if self._file is None:
                path = self._folder / self._shard_name()
                self._file, self._room = path.open("wb"), self._shard_tokens
                self._open_sums = FileSums()
            piece, ids = ids[: self._room], ids[self._room :]
            data = piece.astype(self._dtype).tobytes()
            self._file.write(data)
            self._open_sums.update(data)
            self._room -= piece.size
            self.num_tokens += piece.size
            if self._room == 0:
                self._close_shard()

    def sync(self) -> None:
        """Block until all written bytes are on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _keep(self, num_tokens: int) -> None:
        """Read and hash what an earlier process wrote, up to ``num_tokens``; truncate and delete what is beyond."""
        itemsize = self._dtype.itemsize
        (self._folder / self._split / BLOCKS).unlink(missing_ok=True)
        for path in sorted((self._folder / self._split).iterdir()):
            kept = min(num_tokens - self.num_tokens, self._shard_tokens)
            if not kept:
                path.unlink()
            elif path != self._folder / self._shard_name() or path.stat().st_size < kept * itemsize:
                break
            else:
                os.truncate(path, kept * itemsize)
                self._file, self._room = path.open("ab"), self._shard_tokens - kept
                self._open_sums = FileSums()
                with path.open("rb") as file:
                    while data := file.read(_READ_BYTES):
                        self._open_sums.update(data)
                self.num_tokens += kept
                if self._room == 0:
                    self._close_shard()
        if self.num_tokens < num_tokens:
            path, todo = self._folder / self._shard_name(), f"delete the folder {self._folder.parent}"
            raise UserError("data.dir", f"{path} has lost what was written", todo)

    def _shard_name(self) -> str:
        return f"{self._split}/tokens-{len(self._shards):05d}.bin"

    def finish(self) -> SplitMeta:
        """Close the last file, write the checksums of all blocks, and describe the split."""
        if self._file is not None:
            self._close_shard()
        (self._folder / self._split / BLOCKS).write_bytes(np.array(self._sums, SUM).tobytes())
        return SplitMeta(self.num_tokens, tuple(self._shards))

    def _close_shard(self) -> None:
        assert self._file is not None
        self.sync()
        self._file.close()
        self._file = None
        sha256, sums = self._open_sums.finish()
        self._sums += sums
        self._shards.append(ShardMeta(self._shard_name(), self._shard_tokens - self._room, sha256))


def verify(folder: Path | str) -> tuple[str, ...]:
    """Read every file of a prepared folder, and compare it with what ``meta.json`` says.

    Returns:
        A line for each file that is missing, or has another size or content than was written; empty if there is none.

    Raises:
        UserError: the folder is not a prepared one, or its ``meta.json`` is damaged.
    """
    folder, meta = Path(folder), read_meta(Path(folder))
    itemsize, found = DTYPES[meta.dtype].itemsize, []
    tokens = {shard.file: shard for split in meta.splits.values() for shard in split.shards}
    for name, wanted in {**{name: shard.sha256 for name, shard in tokens.items()}, **meta.files}.items():
        try:
            if name in tokens:
                check_size(folder / name, tokens[name].num_tokens * itemsize)
            check_sha256(folder / name, wanted)
        except UserError as error:
            found.append(error.what)
    return tuple(found)


def check_texts(folder: Path, meta: DataMeta) -> None:
    """Check a prepared folder's tokenizer, chat template and other texts; a UserError names what is damaged."""
    for name, wanted in meta.files.items():
        if not name.endswith(".bin"):
            check_sha256(folder / name, wanted)


def _sums_of(folder: Path, meta: DataMeta, split: str) -> NDArray:
    """Return the checksums of a split's blocks, those of all its files."""
    path, itemsize = folder / split / BLOCKS, DTYPES[meta.dtype].itemsize
    shards = meta.splits[split].shards
    if not shards:
        return np.empty(0, SUM)
    count = sum(num_blocks(shard.num_tokens * itemsize, meta.block_bytes) for shard in shards)
    check_size(path, count * SUM.itemsize)
    check_sha256(path, meta.files.get(f"{split}/{BLOCKS}", ""))
    return np.fromfile(path, SUM)


def check_sha256(path: Path, wanted: str) -> None:
    """Check that a file of a prepared folder has its original content; else raise a UserError that names it."""
    try:
        found = sha256_of(path)
    except FileNotFoundError:
        raise _broken(path, "is missing") from None
    except OSError as error:
        raise _broken(path, f"cannot be read ({error.strerror})") from None
    if found != wanted:
        raise _broken(path, f"is damaged: it has sha256 {found[:12]}… where {wanted[:12]}… was written")


def check_size(path: Path, wanted_bytes: int) -> None:
    """Check that a file of a prepared folder has its original size; else raise a UserError that names it."""
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        raise _broken(path, "is missing") from None
    if num_bytes != wanted_bytes:
        raise _broken(path, f"has {num_bytes:,} bytes where {wanted_bytes:,} were written")


def _broken(path: Path, what: str) -> UserError:
    return UserError("data.dir", f"{path} {what}", "delete the folder and prepare it again")
