"""Documents of prepared plain text as examples in which every token counts, so that documents can be packed into rows.

A document begins with the id that ended the previous one and ends with its own end id, as
`zeroshard.models.document_masks` separates documents. A document that is longer than a row continues in further rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.tokens import TokenDataset

_READ_AT_ONCE = 1 << 24  # ids


class Documents:
    """The documents of a stream of tokens, cut to pieces of ``seq_len`` inputs; rows read it like `store.Examples`.

    The stream is read once, to find where documents end.

    Attributes:
        begins, ends: where each piece begins and ends among the ids, [num_examples]; its last id is only a target.
        counts: None, because every target counts.
    """

    def __init__(self, tokens: TokenDataset, eos_id: int, seq_len: int) -> None:
        self.tokens, self.counts = tokens, None
        marks = _places_of(tokens, eos_id)
        starts = np.unique(np.concatenate((np.zeros(1, np.int64), marks)))
        starts = starts[starts < tokens.num_tokens - 1]  # an end id at the very end begins no document
        num_inputs = np.diff(starts, append=max(tokens.num_tokens - 1, 0))
        pieces = -(-num_inputs // seq_len)
        nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.begins: NDArray[np.int64] = np.repeat(starts, pieces) + nth * seq_len
        self.ends: NDArray[np.int64] = np.minimum(self.begins + seq_len, np.repeat(starts + num_inputs, pieces)) + 1

    @property
    def num_examples(self) -> int:
        """Number of pieces."""
        return self.begins.size


def _places_of(tokens: TokenDataset, eos_id: int) -> NDArray[np.int64]:
    found = [
        begin + np.flatnonzero(tokens.window(begin, min(_READ_AT_ONCE, tokens.num_tokens - begin)) == eos_id)
        for begin in range(0, tokens.num_tokens, _READ_AT_ONCE)
    ]
    return np.concatenate(found) if found else np.zeros(0, np.int64)
