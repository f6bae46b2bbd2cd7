"""Encode a corpus with several processes; the ids are the same for any number of them.

    tables   parts (`tables.Part`)                                        -> workers -> ids of each part, in order
    files    documents -> chunks of text -> about `TASK_BYTES` together   -> workers -> ids of these, in order

A worker reads its parts itself. Of other files this process reads and cuts the text, which is a hundred times as fast
as encoding it; a tokenizer always sees one chunk (`documents.CHUNK_BYTES`) at a time, whichever process encodes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.files import patiently
from zeroshard.data.joining import begin_ids, document_ids, end_ids
from zeroshard.data.meta import DTYPES, SPLITS
from zeroshard.data.sources import TextSource
from zeroshard.data.split import Holdout
from zeroshard.data.tables import Part, PartReader, Tables
from zeroshard.data.tokenizer import TOKENIZER_FILE, Tokenizer, make_tokenizer, read_tokenizer
from zeroshard.data.tokens import TokenWriter

TASK_BYTES = 1 << 20


# A split, and what belongs to it: text to encode, or ids as they are, which begin and end documents.
Piece = tuple[str, str | NDArray[np.int64]]
Task = Part | list[Piece]


class Encoded(NamedTuple):
    """The ids of a task by split, [n] each, and its documents.

    ``num_bytes`` is where a part ends in the source, in bytes as stored, or how much text other pieces have.
    """

    ids: dict[str, NDArray[np.unsignedinteger]]
    num_documents: int
    num_bytes: int


class Encoder:
    """Encodes tasks, in a worker.

    Args:
        folder: a folder whose ``tokenizer.json`` is used if it exists.
        name: name of the tokenizer, used if there is no ``tokenizer.json``.
        dtype: dtype of ids, a key of `meta.DTYPES`.
        holdout: the rule that decides which text of a part validates.
        column: the column of tables that contains the text.
    """

    def __init__(self, folder: Path, name: str, dtype: str, holdout: Holdout, column: str) -> None:
        kept = folder / TOKENIZER_FILE
        self._tokenizer = read_tokenizer(kept) if kept.exists() else make_tokenizer(name, ())
        self._dtype, self._holdout, self._reader = DTYPES[dtype], holdout, PartReader(column)

    def __call__(self, task: Task) -> Encoded:
        """Return the ids of a task; raise UserError if the corpus cannot be read."""
        if isinstance(task, Part):
            todo = "run the same command again: it goes on from here"
            return patiently(lambda: self._of_part(task), task.file.path, todo)
        encode, num_bytes = self._tokenizer.encode_piece, 0
        ids: list[tuple[str, NDArray[np.int64]]] = []
        for split, each in task:
            ids.append((split, encode(each) if isinstance(each, str) else each))
            num_bytes += len(each.encode()) if isinstance(each, str) else 0
        return Encoded(self._joined(ids), 0, num_bytes)

    def close(self) -> None:
        """Close the file that was read last."""
        self._reader.close()

    def _of_part(self, part: Part) -> Encoded:
        ids: list[tuple[str, NDArray[np.int64]]] = []
        num_documents = 0
        try:
            for text in self._reader.texts(part):
                ids += [(split, document_ids(self._tokenizer, side)) for split, side in self._holdout.texts(text)]
                num_documents += 1
        except BaseException:
            self._reader.close()  # a retry opens the file again
            raise
        return Encoded(self._joined(ids), num_documents, part.num_before + self._reader.position(part))

    def _joined(self, ids: Iterable[tuple[str, NDArray[np.int64]]]) -> dict[str, NDArray[np.unsignedinteger]]:
        by_split = {split: [np.empty(0, self._dtype)] for split in SPLITS}
        for split, each in ids:
            by_split[split].append(each.astype(self._dtype))
        return {split: np.concatenate(each) for split, each in by_split.items()}


def tasks_of(
    source: TextSource, holdout: Holdout, tokenizer: Tokenizer, writers: dict[str, TokenWriter]
) -> Iterator[list[Piece]]:
    """Yield documents in pieces, with about `TASK_BYTES` of text together; none for a split that is full."""
    task: list[Piece] = []
    held = 0
    for split, each in _pieces_of(source, holdout, tokenizer, writers):
        task.append((split, each))
        held += len(each) if isinstance(each, str) else 0
        if held >= TASK_BYTES:
            yield task
            task, held = [], 0
    if task:
        yield task


def _pieces_of(
    source: TextSource, holdout: Holdout, tokenizer: Tokenizer, writers: dict[str, TokenWriter]
) -> Iterator[Piece]:
    for document in source.documents():
        for split, side in holdout.sides(document):
            if writers[split].is_full:
                if all(each.is_full for each in writers.values()):
                    return
                continue
            last = ""
            for chunk in side.chunks():
                if not last:
                    yield split, begin_ids(tokenizer)
                yield split, chunk
                last = chunk
                if writers[split].is_full:
                    break
            if last:  # without any character (the head of a tiny document) there is nothing to end
                yield split, end_ids(tokenizer, ends_line=last.endswith("\n"))


def train_texts(source: TextSource | Tables, holdout: Holdout) -> Iterator[str]:
    """Yield the text that a tokenizer may be trained on: no validation text."""
    if isinstance(source, Tables):
        for text in source.texts():
            yield from (piece for split, piece in holdout.texts(text) if split == "train")
        return
    for document in source.documents():
        for split, side in holdout.sides(document):
            if split == "train":
                yield from side.chunks()
