"""The split into training and validation text: one rule for prepared and for streamed data, decided by content alone.

In a corpus of many documents (`MANY_DOCUMENTS` or more), complete documents are held out for validation: those with

    BLAKE2b-64(the document's UTF-8, keyed by the rule's name) < val_fraction * 2^64

So the split depends neither on where a document lies nor on who reads it or when. Copies of a document are in the same
split, a part of the corpus is split as the complete corpus is, and a document that validates at one fraction also
validates at every larger one. A streamed run never trains on text that validates in a folder that was prepared with the
same or a smaller fraction. The fraction is met only approximately. In a table each row is a document, so a text that
spans several rows may be in both splits.

For a corpus of few documents this rule would be too coarse. There the last ``val_fraction`` of *each* document is held
out, cut at a line end if there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zeroshard.data.documents import Document, text_document

MANY_DOCUMENTS = 64
BY_CONTENT, BY_TAIL = "documents-1", "tails-1"  # the rules' names in `meta.json`


@dataclass(frozen=True)
class Holdout:
    """The splitting rule for one corpus."""

    val_fraction: float  # in [0, 1); 0 means no validation
    # documents of the corpus, counted up to `MANY_DOCUMENTS`: decides whether complete documents or tails are held out
    num_documents: int

    @property
    def rule(self) -> str:
        """The rule's name."""
        return BY_CONTENT if self.num_documents >= MANY_DOCUMENTS else BY_TAIL

    def sides(self, document: Document) -> Iterator[tuple[str, Document]]:
        """Yield ``("train" | "val", document)``: the document, or the two parts that it is cut into."""
        if self.val_fraction == 0:
            yield "train", document
        elif self.rule == BY_CONTENT:
            yield ("val" if validates(document.chunks(), self.val_fraction) else "train"), document
        else:
            head, tail = cut(document, int(document.num_bytes * (1 - self.val_fraction)))
            yield "train", head
            yield "val", tail

    def texts(self, text: str) -> Iterator[tuple[str, str]]:
        """Like `sides`, for a document that is in memory; yields no empty texts."""
        if self.val_fraction == 0:
            yield "train", text
        elif self.rule == BY_CONTENT:
            yield ("val" if validates((text,), self.val_fraction) else "train"), text
        else:
            for split, side in self.sides(text_document(text, "")):
                if piece := "".join(side.chunks()):
                    yield split, piece


def validates(chunks: Iterable[str], val_fraction: float) -> bool:
    """Whether the document with this content validates, in a corpus of many documents."""
    digest = hashlib.blake2b(digest_size=8, key=BY_CONTENT.encode())
    for chunk in chunks:
        digest.update(chunk.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little") < val_fraction * 2**64


def cut(document: Document, at_byte: int) -> tuple[Document, Document]:
    """Cut a document into head and tail, at the last line end at or before ``at_byte`` in that byte's chunk.

    If that part of the chunk has no line end, the cut is at the character that ``at_byte`` falls into. Neither part
    reads anything until its chunks are requested.
    """

    def side(is_tail: bool) -> Iterator[str]:
        """Yield the chunks of one of the two parts, read from the document anew."""
        left = at_byte
        for chunk in document.chunks():
            num_bytes = len(chunk) if chunk.isascii() else len(chunk.encode())
            if num_bytes <= left:
                pieces = (chunk, "")
            else:
                pieces = _cut_text(chunk, left) if left else ("", chunk)
            left = left - num_bytes if num_bytes <= left else 0
            if pieces[is_tail]:
                yield pieces[is_tail]
            elif not is_tail:
                return

    return (
        Document(f"{document.name} (head)", at_byte, lambda: side(False)),
        Document(f"{document.name} (tail)", document.num_bytes - at_byte, lambda: side(True)),
    )


def _cut_text(text: str, at_byte: int) -> tuple[str, str]:
    encoded = text.encode()
    at = encoded.rfind(b"\n", 0, at_byte) + 1 or at_byte
    while at and encoded[at] & 0xC0 == 0x80:  # a continuation byte: go back to where its character starts
        at -= 1
    return encoded[:at].decode(), encoded[at:].decode()
