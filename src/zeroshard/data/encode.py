"""Documents of files as ids, by several processes: the same ids for any number of them.

    documents -> pieces of text (at most a chunk each) -> tasks of about `TASK_BYTES` -> workers -> ids, in order

What a tokenizer sees is a chunk (`documents.CHUNK_BYTES`), whoever encodes it. This process reads, cuts and writes; the
others encode, which takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.joining import begin_ids, end_ids
from zeroshard.data.meta import DTYPES
from zeroshard.data.pool import Workers
from zeroshard.data.sources import TextSource
from zeroshard.data.split import Holdout
from zeroshard.data.tokenizer import TOKENIZER_FILE, BpeTokenizer, Tokenizer, make_tokenizer, read_tokenizer
from zeroshard.data.tokens import TokenWriter

TASK_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Text of one document, and where in it.

    Attributes:
        split: that it belongs to.
        text: a chunk of the document; empty only where ``ends``.
        begins, ends: whether the document begins before it, or ends after it.
        ends_line: whether the document's last character is a newline; of a piece that ends one.
    """

    split: str
    text: str
    begins: bool
    ends: bool = False
    ends_line: bool = False


class Encoder:
    """Encodes texts, in a worker.

    Args:
        folder: whose ``tokenizer.json`` is used where it is there.
        name: of the tokenizer.
        dtype: of ids, as `meta.DTYPES` names it.
    """

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        kept = folder / TOKENIZER_FILE
        self._tokenizer = read_tokenizer(kept, name) if kept.exists() else make_tokenizer(name, ())
        self._dtype = DTYPES[dtype]

    def __call__(self, pieces: list[Piece]) -> list[NDArray[np.unsignedinteger]]:
        """The ids of each piece."""
        return [self._tokenizer.encode_piece(piece.text).astype(self._dtype) for piece in pieces]


def encode_pieces(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    writers: dict[str, TokenWriter],
    folder: Path,
    name: str,
    dtype: str,
    num_workers: int,
) -> Iterator[Piece]:
    """Write the ids of ``pieces`` and what joins documents; yields each piece once it is written.

    Args:
        pieces: in order.
        tokenizer: of this process.
        writers: by split.
        folder, name, dtype: of the workers' `Encoder`.
        num_workers: 1 for none but this process.
    """
    with ExitStack() as stack:
        if num_workers == 1:
            encoded = ((task, _encode(tokenizer, task)) for task in _tasks(pieces))
        else:
            workers: Workers[list[Piece], list[NDArray[np.unsignedinteger]]]
            workers = Workers(Encoder, (folder, name, dtype), num_workers)
            stack.callback(workers.close)
            encoded = workers.in_order(_tasks(pieces))
        for task, ids in encoded:
            for piece, ids_of_piece in zip(task, ids, strict=True):
                writer = writers[piece.split]
                if piece.begins:
                    writer.write(begin_ids(tokenizer))
                writer.write(ids_of_piece)
                if piece.ends:
                    writer.write(end_ids(tokenizer, ends_line=piece.ends_line))
                yield piece


def pieces_of(source: TextSource, holdout: Holdout, writers: dict[str, TokenWriter]) -> Iterator[Piece]:
    """What is to be encoded, in order; of a split that is full, nothing."""
    for document in source.documents():
        for split, side in holdout.sides(document):
            if writers[split].is_full:
                if all(each.is_full for each in writers.values()):
                    return
                continue
            begins, last = True, ""
            for chunk in side.chunks():
                yield Piece(split, chunk, begins)
                begins, last = False, chunk
                if writers[split].is_full:
                    break
            if last:  # not a character, as of a tiny document's head: nothing to end
                yield Piece(split, "", begins=False, ends=True, ends_line=last.endswith("\n"))


def train_texts(source: TextSource, holdout: Holdout) -> Iterator[str]:
    """What a tokenizer may learn from: never a word of validation."""
    for document in source.documents():
        for split, side in holdout.sides(document):
            if split == "train":
                yield from side.chunks()


def keep_for_workers(folder: Path, tokenizer: Tokenizer) -> None:
    """Put into ``folder`` what an `Encoder` there needs beside the tokenizer's name."""
    if isinstance(tokenizer, BpeTokenizer):
        (folder / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")


def _encode(tokenizer: Tokenizer, task: list[Piece]) -> list[NDArray[np.int64]]:
    return [tokenizer.encode_piece(piece.text) for piece in task]


def _tasks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    task: list[Piece] = []
    held = 0
    for piece in pieces:
        task.append(piece)
        held += len(piece.text)
        if held >= TASK_BYTES:
            yield task
            task, held = [], 0
    if task:
        yield task
