"""Finished parts of a corpus: each is a file of tokens that a worker makes and one process joins (`bulk`).

    six little-endian int64 (`_HEADER`) | ids of the training split | ids of the validation split

A part's tokens depend only on the part. Its file appears by a rename, so it is complete or absent.
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

_HEADER = struct.Struct("<6q")  # magic; training, validation tokens; documents; bytes of text; bytes of file read
_MAGIC = 0x5A53_5041_5254_0001


@dataclass(frozen=True)
class MadePart:
    """The content of a part's file.

    Attributes:
        tokens: ids by split, [n] each, in one buffer.
        num_documents: documents of both splits.
        num_bytes: size of their text, in UTF-8.
        position: how many bytes of the corpus file had been read once this part was.
    """

    tokens: dict[str, NDArray[np.unsignedinteger]]
    num_documents: int
    num_bytes: int
    position: int

    @property
    def num_tokens(self) -> int:
        """Tokens of both splits."""
        return sum(ids.size for ids in self.tokens.values())


class PartMaker:
    """Makes parts, in a worker; a part whose file exists is not made again.

    Args:
        work: the folder for the ``parts`` files; its ``tokenizer.json`` is used if it exists.
        column: the column of tables that contains the text.
        tokenizer_name: name of the tokenizer, used if there is no ``tokenizer.json``.
        dtype: dtype of ids, a key of `zeroshard.data.meta.DTYPES`.
        holdout: the rule that decides which text validates.
    """

    def __init__(self, work: Path, column: str, tokenizer_name: str, dtype: str, holdout: Holdout) -> None:
        kept = work / "tokenizer.json"
        self._tokenizer = read_tokenizer(kept) if kept.exists() else make_tokenizer(tokenizer_name, ())
        self._work, self._dtype, self._holdout = work, DTYPES[dtype], holdout
        self._reader = PartReader(column)

    def __call__(self, part: Part) -> str:
        """Return the path of the part's file; raise UserError if the corpus cannot be read."""
        path = self._work / "parts" / f"{part.index:08d}.bin"
        if not path.exists():
            todo = "run the same command again: it goes on from here"
            patiently(lambda: self._make(part, path), part.file.path, todo)
        return str(path)

    def close(self) -> None:
        """Close the file that was read last."""
        self._reader.close()

    def _make(self, part: Part, path: Path) -> None:
        try:
            header, ids = self._tokens(part)
        except BaseException:
            self._reader.close()  # a retry opens the file again
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
    """Return the part in a file that `PartMaker` wrote; ``dtype`` is the dtype of its ids.

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
    """Write a file that is complete or absent, even if the machine stops."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
