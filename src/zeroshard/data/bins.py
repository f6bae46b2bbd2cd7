"""Token files that other programs wrote: nanoGPT's ``train.bin`` and ``val.bin``, and llm.c's files with a header.

nanoGPT: uint16 ids without a header. llm.c: 256 int32 (magic, version, number of tokens, zeros), then uint16 ids
(20240520, version 1: GPT-2's) or uint32 ids (20240801, version 7: Llama 3's). Both are little-endian. A file belongs to
the validation split if its name has ``val``, ``valid`` or ``validation`` as a word: ``val.bin``, ``edu_val_000.bin``,
not ``retrieval.bin``.

https://github.com/karpathy/nanoGPT/tree/master/data,
https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.chosen_files import choose
from zeroshard.data.files import FileFacts, Fingerprint, facts_of
from zeroshard.data.tables import corpus_identity
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import open_binary

_HEADER_INTS = 256
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) -> dtype of ids
_BLOCK_TOKENS = 1 << 22
_VALIDATES = frozenset({"val", "valid", "validation"})


@dataclass(frozen=True)
class _Bin:
    """One file of ids, and how to read it."""

    facts: FileFacts
    dtype: str
    offset_bytes: int

    @property
    def validates(self) -> bool:
        return not _VALIDATES.isdisjoint(re.split("[^a-z]+", Path(self.facts.path).stem.lower()))

    def ids(self) -> NDArray[np.unsignedinteger]:
        return np.memmap(self.facts.path, dtype=self.dtype, mode="r", offset=self.offset_bytes)


class TokenBins:
    """Token ids in files; a source without text.

    Args:
        paths: files, or folders with ``.bin`` files.
        vocab_size: vocabulary size of the tokenizer that made them; None: one more than the largest id.

    Raises:
        UserError: there is no file, or a header does not match its file.
    """

    rule = "words-1"  # the rule that assigns files to splits, as recorded in `meta.json`

    def __init__(self, paths: Sequence[str], vocab_size: int | None) -> None:
        self.description = ", ".join(paths)
        self._files = [_look_at(facts_of(file)) for file in choose(paths, ".bin").files]
        self._asked = vocab_size

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids; the first access reads all files. UserError if an id is too large for the given tokenizer."""
        largest = max(int(block.max()) for file in self._files for block in _blocks(file.ids()))
        if self._asked is not None and largest >= self._asked:
            todo = "say which tokenizer made them by --data.tokenizer, or none"
            raise UserError("data.tokenizer", f"an id is {largest:,}, and it has {self._asked:,} ids", todo)
        return self._asked or largest + 1

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint of names, sizes, heads and tails; 0 documents, because there is no text."""
        facts = [file.facts for file in self._files]
        digest = hashlib.sha256(corpus_identity(facts).encode()).hexdigest()
        return Fingerprint(sum(each.num_bytes for each in facts), 0, digest)

    def split(self, val_fraction: float) -> Iterator[tuple[str, NDArray[np.unsignedinteger]]]:
        """Yield ``("train" | "val", ids)`` in blocks; without validation files the last ``val_fraction`` is ``val``."""
        for split, file, start, stop in self._ranges(val_fraction):
            for block in _blocks(file.ids()[start:stop]):
                yield split, block

    def _ranges(self, val_fraction: float) -> Iterator[tuple[str, _Bin, int, int]]:
        """Yield, in order, split, file, and the range of tokens ``[start, stop)`` in it."""
        sizes = [file.ids().size for file in self._files]
        if any(file.validates for file in self._files):
            for file, size in zip(self._files, sizes, strict=True):
                yield ("val" if file.validates else "train"), file, 0, size
            return
        left = sum(sizes) - int(sum(sizes) * val_fraction)
        for file, size in zip(self._files, sizes, strict=True):
            cut = min(max(left, 0), size)
            yield "train", file, 0, cut
            yield "val", file, cut, size
            left -= size


def _blocks(ids: NDArray[np.unsignedinteger]) -> Iterator[NDArray[np.unsignedinteger]]:
    for start in range(0, ids.size, _BLOCK_TOKENS):
        yield np.asarray(ids[start : start + _BLOCK_TOKENS])


def _look_at(facts: FileFacts) -> _Bin:
    with open_binary(facts.path) as file:
        start = file.read(4 * _HEADER_INTS)
    header = np.frombuffer(start, dtype="<i4") if len(start) == 4 * _HEADER_INTS else np.zeros(1, "<i4")
    if int(header[0]) in (magic for magic, _ in _LLM_C):
        magic, version, num_tokens = header[:3].tolist()
        dtype = _LLM_C.get((magic, version))
        if dtype is None:
            raise UserError("data.path", f"{facts.path} is of llm.c's version {version}", "write it again with llm.c")
        expected = header.nbytes + num_tokens * np.dtype(dtype).itemsize
        if facts.num_bytes != expected:
            what = f"{facts.path} has {facts.num_bytes:,} bytes where its header says {expected:,}"
            raise UserError("data.path", what, "copy it again")
        return _Bin(facts, dtype, header.nbytes)
    if facts.num_bytes % 2:
        raise UserError("data.path", f"{facts.path} has an odd number of bytes, and ids have two", "copy it again")
    return _Bin(facts, "<u2", 0)
