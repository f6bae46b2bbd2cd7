"""The files of examples in a prepared folder, beside their ids.

DIR/train/tokens-00000.bin   ids of all examples, one after the other (see `zeroshard.data.tokens`)
DIR/train/counts.bin         one byte per id: 1 if it counts in the loss
DIR/train/ends.bin           one little-endian int64 per example: the position of its end among the ids
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.examples.encode import Encoded
from zeroshard.data.meta import COUNTS, ENDS, DataMeta, ExamplesMeta, read_meta, sha256_of
from zeroshard.data.tokens import TokenDataset, TokenWriter, check_sha256, check_size
from zeroshard.host.errors import UserError

_END = np.dtype("<i8")


class ExampleWriter:
    """Appends examples to one split of a folder that is being prepared.

    Args:
        split: ``train`` or ``val``.
        dtype: dtype of the ids, a key of `zeroshard.data.meta.DTYPES`.
        shard_tokens: ids per file.
    """

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int) -> None:
        self.tokens = TokenWriter(folder, split, dtype, shard_tokens)
        self.num_examples = self._num_counted = 0
        self._paths = folder / split / COUNTS, folder / split / ENDS
        self._files = tuple(path.open("wb") for path in self._paths)

    def close(self) -> None:
        """Close the files, however the preparation ended."""
        self.tokens.close()
        for file in self._files:
            file.close()

    def write(self, example: Encoded) -> None:
        """Append one example."""
        self.tokens.write(example.ids)
        ends = np.array([self.tokens.num_tokens], dtype=_END)
        for file, values in zip(self._files, (example.counts.astype(np.uint8), ends), strict=True):
            file.write(values.tobytes())
        self.num_examples += 1
        self._num_counted += int(example.counts.sum())

    def finish(self) -> ExamplesMeta:
        """Close the files and return their description."""
        for file in self._files:
            file.close()
        return ExamplesMeta(self.num_examples, self._num_counted, *map(sha256_of, self._paths))


class Examples:
    """The examples of one split of a prepared folder, memory-mapped.

    Args:
        split: ``train`` or ``val``.

    Raises:
        UserError: the folder contains plain text, or a file is missing or damaged; tokens are checked as they are read.
    """

    def __init__(self, folder: Path, split: str) -> None:
        meta = read_meta(folder)
        if not meta.examples:
            what = f"{folder} was prepared as plain text"
            raise UserError("data.dir", what, "name another folder, or prepare it again with --data.format")
        self.tokens = TokenDataset.open(folder, split)
        self.vocab_size = self.tokens.vocab_size
        num_examples = meta.examples[split].num_examples
        for name in (ENDS, COUNTS):
            check_sha256(folder / split / name, meta.files.get(f"{split}/{name}", ""))
        self.ends = _mapped(folder / split / ENDS, _END, num_examples)
        self.counts: NDArray[np.uint8] = _mapped(folder / split / COUNTS, np.dtype(np.uint8), self.tokens.num_tokens)
        if num_examples and int(self.ends[-1]) != self.tokens.num_tokens:
            todo = "delete the folder and prepare it again"
            raise UserError("data.dir", f"{folder / split / ENDS} does not fit the tokens beside it", todo)
        self.begins = np.concatenate((np.zeros(1, np.int64), self.ends))[:-1]  # [num_examples], among the ids

    @property
    def num_examples(self) -> int:
        """Number of examples in the split."""
        return self.ends.size


def require_plain(folder: Path, meta: DataMeta) -> None:
    """Raise UserError if a folder contains examples: read as one stream, prompts would count like answers."""
    if meta.examples:
        what = f"{folder} holds examples of format {meta.spec.get('format')}, and no plain text"
        raise UserError("data.dir", what, "name another folder, or add --data.format as it was prepared")


def _mapped(path: Path, dtype: np.dtype, size: int) -> NDArray:
    check_size(path, size * dtype.itemsize)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if size else np.empty(0, dtype)
