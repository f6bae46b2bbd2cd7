"""Which text trains and which validates: one rule for what is prepared and what is streamed, decided by content alone.

Of a corpus of many documents whole documents go to validation: those with

    BLAKE2b-64(the document's UTF-8, keyed by the rule's name) < val_fraction * 2^64

So it matters neither where a document lies nor who reads it or when: copies of a document go to one side, a part of the
corpus is split as the whole is, and what validates at a fraction also validates at a larger one. A run that is streamed
never trains on what validates in a folder that was prepared with the same fraction or a smaller one. The fraction is
met as closely as chance has it. In a table a row is a document: a text that is spread over rows lies on both sides.

Of a corpus of few documents that would be too coarse: there the last ``val_fraction`` of *each* goes to validation,
cut at a line end where there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zeroshard.data.documents import Document, text_document

MANY_DOCUMENTS = 64
BY_CONTENT, BY_TAIL = "documents-1", "tails-1"  # the rules, in `meta.json`


@dataclass(frozen=True)
class Holdout:
    """The rule for one corpus.

    Attributes:
        val_fraction: in [0, 1); 0 means that everything trains.
        num_documents: of the corpus, counted as far as `MANY_DOCUMENTS`: it chooses between whole documents and tails.
    """

    val_fraction: float
    num_documents: int

    @property
    def rule(self) -> str:
        """Its name."""
        return BY_CONTENT if self.num_documents >= MANY_DOCUMENTS else BY_TAIL

    def sides(self, document: Document) -> Iterator[tuple[str, Document]]:
        """``("train" | "val", document)``; one, or the two that it was cut into."""
        if self.val_fraction == 0:
            yield "train", document
        elif self.rule == BY_CONTENT:
            yield ("val" if validates(document.chunks(), self.val_fraction) else "train"), document
        else:
            head, tail = cut(document, int(document.num_bytes * (1 - self.val_fraction)))
            yield "train", head
            yield "val", tail

    def texts(self, text: str) -> Iterator[tuple[str, str]]:
        """As `sides`, of a document that is in memory; no empty texts."""
        if self.val_fraction == 0:
            yield "train", text
        elif self.rule == BY_CONTENT:
            yield ("val" if validates((text,), self.val_fraction) else "train"), text
        else:
            for split, side in self.sides(text_document(text, "")):
                if piece := "".join(side.chunks()):
                    yield split, piece


def validates(chunks: Iterable[str], val_fraction: float) -> bool:
    """Whether the document with this content validates, of a corpus of many."""
    digest = hashlib.blake2b(digest_size=8, key=BY_CONTENT.encode())
    for chunk in chunks:
        digest.update(chunk.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little") < val_fraction * 2**64


def cut(document: Document, at_byte: int) -> tuple[Document, Document]:
    """Head and tail that together are the document: cut at the last line end at or before ``at_byte`` in its chunk.

    Where that chunk has none, the cut is at the character that ``at_byte`` falls into. Neither
    reads anything until its chunks are asked for.
    """

    def side(is_tail: bool) -> Iterator[str]:
        """The chunks of one of the two, read from the document anew."""
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
