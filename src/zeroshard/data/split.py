"""Which text trains and which validates: disjoint, deterministic, and spread over the corpus.

Of a corpus of many documents whole documents go to validation, spread evenly: one goes there exactly when those
before it hold less than ``val_fraction`` of their bytes. So the first always trains, the choice never depends on a
document's own size (small ones are not favoured), and the fraction is met within one document.

Of a corpus of few documents that would be too coarse: there the last ``val_fraction`` of *each* goes to validation,
cut at a line end where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zeroshard.data.documents import Document

MANY_DOCUMENTS = 64


def split_documents(
    documents: Iterable[Document], num_documents: int, val_fraction: float
) -> Iterator[tuple[str, Document]]:
    """``("train" | "val", document)`` in corpus order; documents that were cut come as two.

    Args:
        documents: the corpus.
        num_documents: how many there are: it chooses between whole documents and tails.
        val_fraction: in [0, 1), of the bytes; 0 means that everything trains.
    """
    if val_fraction == 0:
        for document in documents:
            yield "train", document
    elif num_documents >= MANY_DOCUMENTS:
        yield from _by_document(documents, val_fraction)
    else:
        for document in documents:
            head, tail = cut(document, int(document.num_bytes * (1 - val_fraction)))
            yield "train", head
            yield "val", tail


def _by_document(documents: Iterable[Document], val_fraction: float) -> Iterator[tuple[str, Document]]:
    all_bytes = val_bytes = 0
    for document in documents:
        is_val = val_bytes < val_fraction * all_bytes
        all_bytes += document.num_bytes
        val_bytes += is_val * document.num_bytes
        yield ("val" if is_val else "train"), document


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
