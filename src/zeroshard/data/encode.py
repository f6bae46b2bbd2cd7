"""Encode the documents of files with several processes; the ids are the same for any number of them.

    documents -> pieces of text (at most a chunk each) -> tasks of about `TASK_BYTES` -> workers -> ids, in order

A tokenizer always sees one chunk (`documents.CHUNK_BYTES`) at a time, whichever process encodes it. This process reads,
cuts and writes; the others encode, which takes a hundred times as long.
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
    """A piece of one document's text, and its place in the document.

    Attributes:
        split: the split that it belongs to.
        text: a chunk of the document; empty only if ``ends``.
        begins, ends: whether the document begins before this piece, or ends after it.
        ends_line: whether the document's last character is a newline; used only if ``ends``.
    """

    split: str
    text: str
    begins: bool
    ends: bool = False
    ends_line: bool = False


class Encoder:
    """Encodes texts in a worker.

    Args:
        folder: a folder whose ``tokenizer.json`` is used if it exists.
        name: name of the tokenizer.
        dtype: dtype of ids, a key of `meta.DTYPES`.
    """

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        kept = folder / TOKENIZER_FILE
        self._tokenizer = read_tokenizer(kept, name) if kept.exists() else make_tokenizer(name, ())
        self._dtype = DTYPES[dtype]

    def __call__(self, pieces: list[Piece]) -> list[NDArray[np.unsignedinteger]]:
        """Return the ids of each piece."""
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
    """Write the ids of ``pieces``, and the ids that begin and end documents; yield each piece once it is written.

    Args:
        pieces: the pieces, in order.
        tokenizer: the tokenizer for this process.
        writers: a writer per split.
        folder, name, dtype: arguments of the workers' `Encoder`.
        num_workers: number of processes; 1 encodes in this process.
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
    """Yield the pieces to encode, in order; none for a split that is full."""
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
            if last:  # without any character (the head of a tiny document) there is nothing to end
                yield Piece(split, "", begins=False, ends=True, ends_line=last.endswith("\n"))


def train_texts(source: TextSource, holdout: Holdout) -> Iterator[str]:
    """Yield the text that a tokenizer may be trained on: no validation text."""
    for document in source.documents():
        for split, side in holdout.sides(document):
            if split == "train":
                yield from side.chunks()


def keep_for_workers(folder: Path, tokenizer: Tokenizer) -> None:
    """Write into ``folder`` the ``tokenizer.json`` that an `Encoder` there needs, if the name is not enough."""
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
