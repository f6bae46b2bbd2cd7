"""How documents are joined to one stream of ids, how a prompt begins, and how many bytes of text ids stand for.

    begin  ids of the document  end        begin  ids of the next  end        ...

- *begin*: the ids that the tokenizer's file puts before a text: BOS for LLaMA's, none for `bytes`, tiktoken's and
  `bpe:N`.
- *end*: the ids that it puts after a text, and then the end-of-text id unless that is already the last of them. If a
  tokenizer has neither, such as `bytes`, a document ends with a newline, which is added if it is missing.

So a document has the ids that the tokenizers library gives it, and its end. A prompt has the beginning and not the end.
These marks are predicted like other ids and count as tokens; as text they have no bytes (bits per byte, see
`num_text_bytes`).

[Note: Ids that go on]
    What an id stands for may depend on its neighbours: decoders of SentencePiece leave out the space of a text's first
    token. So ids that go on after others are decoded with these, and what those alone give is left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.tokenizer import BpeTokenizer, ByteTokenizer, Ids, TiktokenTokenizer, Tokenizer


def begin_ids(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the ids before each document, [n]; mostly none."""
    return np.asarray(tokenizer.around[0], dtype=np.int64)


def end_ids(tokenizer: Tokenizer, *, ends_line: bool) -> NDArray[np.int64]:
    """Return the ids after a document, [n]; ``ends_line``: the document's last character is a newline."""
    after, eos_id = list(tokenizer.around[1]), tokenizer.eos_id
    if eos_id is not None and after[-1:] != [eos_id]:
        after.append(eos_id)
    if after or ends_line:
        return np.asarray(after, dtype=np.int64)
    return tokenizer.encode_piece("\n")


def document_ids(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    """Return a document's ids with its begin and end ids, [n]."""
    has_mark = tokenizer.eos_id is not None or bool(tokenizer.around[1])
    if not has_mark and not text.endswith("\n"):
        text += "\n"  # added before encoding, because the tokenizer may merge it with the text
    end = end_ids(tokenizer, ends_line=True)
    return np.concatenate([begin_ids(tokenizer), tokenizer.encode_piece(text), end])


def prompt_ids(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    """Return the ids of a text that the model is to continue, [n]: with a document's begin ids, without its end."""
    return np.concatenate([begin_ids(tokenizer), tokenizer.encode_piece(text)])


def marks_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that begin and end documents and stand for no text."""
    before, after = tokenizer.around
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return sorted({*before, *after, *eos})


def num_text_bytes(tokenizer: Tokenizer, ids: NDArray[np.integer], before: Ids = ()) -> int:
    """Return the number of UTF-8 bytes that ``ids``, [n], stand for after the ids ``before``; marks stand for none.

    It is exact if the tokenizer is byte-level. Otherwise documents are decoded one by one, the first one after what of
    ``before`` is of it: [Note: Ids that go on]. A character that is cut at either end counts as U+FFFD, three bytes.
    """
    lengths = _byte_lengths(tokenizer)
    if lengths is not None:
        return int(lengths[ids].sum())

    def of_documents(ids: NDArray[np.integer]) -> int:
        is_mark = np.isin(ids, marks_of(tokenizer))
        pieces = np.split(ids, np.flatnonzero(is_mark))
        return sum(len(tokenizer.decode(piece[~np.isin(piece, marks_of(tokenizer))]).encode()) for piece in pieces)

    known = np.asarray(before, dtype=np.int64)
    return of_documents(np.concatenate([known, ids])) - of_documents(known)


def _byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """Return the number of bytes of each id, [vocab_size]; None if it depends on the neighbouring ids."""
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    if isinstance(tokenizer, ByteTokenizer):
        return lengths + 1
    if isinstance(tokenizer, TiktokenTokenizer):
        for token, id_ in tokenizer.ranks.items():
            lengths[id_] = len(token)
        return lengths
    if isinstance(tokenizer, BpeTokenizer) and tokenizer.is_byte_level:
        for text, id_ in tokenizer.ordinary_tokens.items():
            lengths[id_] = len(text)  # a character for each byte
        lengths[marks_of(tokenizer)] = 0
        return lengths
    return None
