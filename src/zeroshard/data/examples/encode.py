"""Encode examples as token ids, and mark which of them count in the loss.

A text is encoded as a whole, as in generation and in `transformers`; a token counts if it contains a character that
counts. In chats, the marks that a template writes (``<|im_start|>``) become the tokenizer's special tokens. In pairs of
prompt and completion, text that spells a special token stays plain text, and the tokenizer's own begin and end ids are
added (see `zeroshard.data.joining`). The end ids count, because the model must learn to stop there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.examples.texts import ExampleText
from zeroshard.data.joining import begin_ids, end_ids
from zeroshard.data.template_worker import Span
from zeroshard.data.tokenizer import BpeTokenizer, Tokenizer


class Encoded(NamedTuple):
    """One example: its ids [n], int64, and whether each of them counts [n], bool."""

    ids: NDArray[np.int64]
    counts: NDArray[np.bool_]


class ExampleEncoder:
    """Encodes examples.

    Args:
        tokenizer: the model's tokenizer.
        is_chat: True: a template has written the special tokens as text. False: the text is plain, and the tokenizer's
            begin and end ids are added.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_chat: bool) -> None:
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._inner: Any = None
        if isinstance(tokenizer, BpeTokenizer):
            import tokenizers

            self._inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
            self._inner.encode_special_tokens = not is_chat

    def __call__(self, examples: Sequence[ExampleText]) -> list[Encoded]:
        """Encode ``examples``, in order; raise UserError if the tokenizer has no token for a character."""
        found = self._by_offsets(examples) if self._inner is not None else [self._by_pieces(each) for each in examples]
        return found if self._is_chat else [self._with_ends(*pair) for pair in zip(found, examples, strict=True)]

    def _by_offsets(self, examples: Sequence[ExampleText]) -> list[Encoded]:
        try:
            encodings = self._inner.encode_batch([each.text for each in examples], add_special_tokens=False)
        except Exception as error:
            if "[UNK]" not in str(error):  # the library has no exception class for it, only this message
                raise
            for each in examples:
                self._tokenizer.encode_piece(each.text)  # raises UserError that names the character
            raise
        found = []
        for encoding, example in zip(encodings, examples, strict=True):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            found.append(Encoded(np.asarray(encoding.ids, dtype=np.int64), _touched(offsets, example.spans)))
        return found

    def _by_pieces(self, example: ExampleText) -> Encoded:
        """Encode without offsets: each span that counts is encoded separately, so tokens end at its borders."""
        ids, counts, at = [], [], 0
        for begin, end in (*example.spans, (len(example.text), len(example.text))):
            for piece, does_count in ((example.text[at:begin], False), (example.text[begin:end], True)):
                if piece:
                    ids.append(self._tokenizer.encode_piece(piece))
                    counts.append(np.full(ids[-1].size, does_count))
            at = end
        return Encoded(np.concatenate(ids), np.concatenate(counts))

    def _with_ends(self, encoded: Encoded, example: ExampleText) -> Encoded:
        before = begin_ids(self._tokenizer)
        after = end_ids(self._tokenizer, ends_line=example.text.endswith("\n"))
        counts = (np.zeros(before.size, bool), encoded.counts, np.ones(after.size, bool))
        return Encoded(np.concatenate((before, encoded.ids, after)), np.concatenate(counts))


def _touched(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return which tokens, given their ``offsets`` [n, 2], contain a character of ``spans``.

    A post-processor may trim spaces off the offsets. A token whose offsets become empty counts by the position of its
    end.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    is_empty = begins == ends
    counts = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        counts |= np.where(is_empty, (begin < ends) & (ends <= end), (begins < end) & (ends > begin))
    return counts
