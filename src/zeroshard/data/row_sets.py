"""Rows of ``seq_len`` tokens with random access by number: the interface that shuffled and mixed batches read from.

Shapes: B rows, T = seq_len.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.data.base import Tokens, num_rows, read_rows_ahead


class Rows(Protocol):
    """Rows with random access."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        ...

    def targets_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of ``rows`` how many of its targets count."""
        ...

    def inputs_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of ``rows`` how many of its T tokens are not padding."""
        ...

    def read(self, wanted: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return ``(tokens_BT, targets_BT)``, int64; for packed rows also ``positions_BT``."""
        ...

    def read_ahead(self, wanted: NDArray[np.int64]) -> None:
        """Begin to fetch rows that will be read soon; return at once."""
        ...


class TextRows:
    """Rows of plain text: a stream of tokens cut every T tokens; implements `Rows`.

    Args:
        tokens: the stream.
        seq_len: T.
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    @property
    def num_rows(self) -> int:
        """Number of complete rows."""
        return num_rows(self.tokens, self.seq_len)

    def targets_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return T for each row: every target counts."""
        return np.full(rows.shape, self.seq_len)

    def inputs_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return T for each row: there is no padding."""
        return np.full(rows.shape, self.seq_len)

    def read(self, wanted: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return ``(tokens_BT, targets_BT)``, int64."""
        window = self.tokens.gather(wanted * self.seq_len, self.seq_len + 1).astype(np.int64)  # [B, T + 1]
        return torch.from_numpy(window[:, :-1].copy()), torch.from_numpy(window[:, 1:].copy())

    def read_ahead(self, wanted: NDArray[np.int64]) -> None:
        """Begin to fetch these rows; return at once."""
        read_rows_ahead(self.tokens, wanted, self.seq_len)
