"""Read documents from files, chunk by chunk: strict UTF-8, errors that name the file and the byte, bounded memory."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from zeroshard.data.files import Fingerprint
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import open_binary

CHUNK_BYTES = 1 << 20  # fixed, because the ids depend on it: a tokenizer encodes each chunk separately


@dataclass(frozen=True)
class Document:
    """One text, possibly larger than memory: each call of ``chunks`` reads it again from the beginning.

    Chunks are at most a few MiB and end at line ends if there are any. ``num_bytes`` counts UTF-8.
    """

    name: str
    num_bytes: int
    chunks: Callable[[], Iterator[str]]


def text_document(text: str, name: str) -> Document:
    """Return a document for a text that is in memory already."""
    return Document(name, len(text.encode()), lambda: iter((text,)))


def documents_of(files: Sequence[Path]) -> Iterator[Document]:
    """Yield one document per file, in order; a UserError while a file is read that is not UTF-8 or has a NUL byte."""
    for path in files:
        yield Document(str(path), path.stat().st_size, lambda path=path: read_chunks(path))


def fingerprint_of(files: Sequence[Path]) -> Fingerprint:
    """Read files block by block and fingerprint their bytes; raise UserError if one cannot be read."""
    sums, num_bytes = [], 0
    for path in files:
        digest = hashlib.sha256()
        with _open(path) as file:
            while block := file.read(CHUNK_BYTES):
                digest.update(block)
                num_bytes += len(block)
        sums.append(digest.hexdigest())
    if len(sums) == 1:
        return Fingerprint(num_bytes, 1, sums[0])
    total = hashlib.sha256("".join(f"{each}\n" for each in sums).encode())
    return Fingerprint(num_bytes, len(sums), total.hexdigest())


def read_chunks(path: Path) -> Iterator[str]:
    """Yield a UTF-8 file as text, about `CHUNK_BYTES` at a time, cut at line ends if there are any.

    Raises:
        UserError: a byte is not UTF-8, or is NUL; the message gives its offset.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, carry = 0, ""
    with _open(path) as file:
        while True:
            block = file.read(CHUNK_BYTES)
            undecoded = len(decoder.getstate()[0])
            if (nul := block.find(0)) >= 0:
                raise _not_text(path, f"a NUL byte at offset {offset + nul:,}")
            try:
                text = carry + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_text(path, f"{error.reason} at offset {offset - undecoded + error.start:,}") from None
            if not block:
                break
            offset += len(block)
            cut = text.rfind("\n") + 1 or len(text)
            carry = text[cut:]
            if cut:
                yield text[:cut]
    if text:
        yield text


def _open(path: Path) -> BinaryIO:
    try:
        return open_binary(path)
    except OSError as error:
        raise UserError("data.path", f"cannot read {path}: {error.strerror}", "check the file") from None


def _not_text(path: Path, what: str) -> UserError:
    return UserError("data.path", f"{path} is not UTF-8 text: {what}", "convert it to UTF-8 or leave it out")
