"""Finished parts of a corpus: a file of tokens each, which a worker makes and one process joins (`bulk`).

    six little-endian int64 (`_HEADER`) | ids that train | ids that validate

A part's tokens depend on nothing but the part. Its file appears by a rename, whole or not at all.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.files import patiently
from zeroshard.data.joining import document_ids
from zeroshard.data.meta import DTYPES, SPLITS
from zeroshard.data.split import Holdout
from zeroshard.data.tables import Part, PartReader
from zeroshard.data.tokenizer import make_tokenizer, read_tokenizer
from zeroshard.errors import UserError

_HEADER = struct.Struct("<6q")  # magic; tokens that train, that validate; documents; bytes of text, bytes of the file
_MAGIC = 0x5A53_5041_5254_0001


@dataclass(frozen=True)
class MadePart:
    """What is in the file of a part.

    Attributes:
        tokens: ids by split, [n] each, in one buffer.
        num_documents: of both splits.
        num_bytes: of their text, in UTF-8.
        position: how much of the file that they came from had been read, in bytes.
    """

    tokens: dict[str, NDArray[np.unsignedinteger]]
    num_documents: int
    num_bytes: int
    position: int

    @property
    def num_tokens(self) -> int:
        """Of both splits."""
        return sum(ids.size for ids in self.tokens.values())


class PartMaker:
    """Makes parts, in a worker; a part that is there is not made again.

    Args:
        work: the folder whose ``parts`` they go into, and whose ``tokenizer.json`` is used where it is there.
        column: of tables, that holds the text.
        tokenizer_name: of the tokenizer, where there is no file of it.
        dtype: of ids, as `zeroshard.data.meta.DTYPES` names it.
        holdout: which text validates.
    """

    def __init__(self, work: Path, column: str, tokenizer_name: str, dtype: str, holdout: Holdout) -> None:
        kept = work / "tokenizer.json"
        self._tokenizer = read_tokenizer(kept) if kept.exists() else make_tokenizer(tokenizer_name, ())
        self._work, self._dtype, self._holdout = work, DTYPES[dtype], holdout
        self._reader = PartReader(column)

    def __call__(self, part: Part) -> str:
        """The path of the part's file; a UserError where the corpus cannot be read."""
        path = self._work / "parts" / f"{part.index:08d}.bin"
        if not path.exists():
            todo = "run the same command again: it goes on from here"
            patiently(lambda: self._make(part, path), part.file.path, todo)
        return str(path)

    def close(self) -> None:
        """Let go of the file that was read last."""
        self._reader.close()

    def _make(self, part: Part, path: Path) -> None:
        try:
            header, ids = self._tokens(part)
        except BaseException:
            self._reader.close()  # what is read again is opened again
            raise
        write_whole(path, header, *ids)

    def _tokens(self, part: Part) -> tuple[bytes, list[Any]]:
        ids: dict[str, list[NDArray[np.unsignedinteger]]] = {split: [] for split in SPLITS}
        num_documents = num_bytes = 0
        for text in self._reader.texts(part):
            for split, piece in self._holdout.texts(text):
                ids[split].append(document_ids(self._tokenizer, piece).astype(self._dtype))
            num_documents += 1
            num_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        counts = [sum(each.size for each in ids[split]) for split in SPLITS]
        header = _HEADER.pack(_MAGIC, *counts, num_documents, num_bytes, self._reader.position(part))
        return header, [each.data for split in SPLITS for each in ids[split]]


def read_part(path: str, dtype: np.dtype[Any]) -> MadePart:
    """The part in a file that `PartMaker` wrote; ``dtype``: of its ids.

    Raises:
        UserError: the file is damaged.
    """
    data = np.fromfile(path, dtype=np.uint8)
    magic, num_train, num_val, num_documents, num_bytes, position = _HEADER.unpack_from(data.data)
    ids = data[_HEADER.size :].view(dtype)
    if magic != _MAGIC or ids.size != num_train + num_val:
        raise UserError("data.dir", f"{path} is damaged", f"delete the folder {Path(path).parents[1]}")
    return MadePart({"train": ids[:num_train], "val": ids[num_train:]}, num_documents, num_bytes, position)


def write_whole(path: Path, *pieces: Any) -> None:
    """A file that is there whole or not at all, even if the machine stops."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
