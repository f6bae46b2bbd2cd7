"""What batches are made of: streams of tokens, rows cut from them, and the two protocols that training depends on.

Shapes: B rows, T = seq_len. Row ``i`` of a stream is tokens ``[i * T, i * T + T + 1)``: the first T are the inputs, the
last T (shifted by one) are the targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.host.errors import UserError
from zeroshard.settings import rules

IGNORED = -100  # target of a position without one: the default ignore_index of torch's cross_entropy
# Tokens, targets, the loss's weight (0-dim); and positions if rows are packed.
EvalBatch = tuple[Tensor, Tensor, Tensor, *tuple[Tensor, ...]]


def as_arguments(positions: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the model's keyword arguments other than tokens and targets, from a batch's tensors after those two."""
    return {"positions_BT": positions[0]} if positions else {}


def part_of(rows: Tensor, part: int, num_parts: int) -> Tensor:
    """Return part number ``part`` of rows [B, T, ...] that are cut into ``num_parts`` along T.

    Raises:
        UserError: the parts would not be equally long.
    """
    rules.check_cut(rows.shape[1], num_parts)
    length = rows.shape[1] // num_parts
    return rows[:, part * length : (part + 1) * length]


class Batches(Protocol):
    """Training batches as a function of the step: to resume, call it with a later step."""

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, ...]:
        """Return ``(tokens_BT, targets_BT)``, int64, on the CPU; always the same for the same arguments.

        If rows contain several examples that must not attend to each other, there is a third tensor ``positions_BT``,
        int64, which counts from 0 in each example: see `as_arguments`.
        """


class Tokens(Protocol):
    """A stream of token ids with random access: the part of a corpus that batches depend on."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the stream."""

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.unsignedinteger]:
        """Return ``[len(starts), length]``: the ``length`` tokens from each start."""


class Rows(Protocol):
    """Rows with random access."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    def targets_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of ``rows`` how many of its targets count."""

    def read(self, wanted: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return ``(tokens_BT, targets_BT)``, int64; for packed rows also ``positions_BT``."""


class TextRows:
    """Rows of plain text: a stream of tokens cut every T tokens; implements `Rows`.

    Raises:
        ValueError: the stream is shorter than a row.
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        if self.num_rows < 1:
            raise ValueError(f"{tokens.num_tokens} tokens hold no row of seq_len {seq_len}: {seq_len + 1} are needed")

    @property
    def num_rows(self) -> int:
        """Number of complete rows."""
        return num_rows(self.tokens, self.seq_len)

    def targets_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return T for each row: every target counts."""
        return np.full(rows.shape, self.seq_len)

    def read(self, wanted: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return ``(tokens_BT, targets_BT)``, int64."""
        window = self.tokens.gather(wanted * self.seq_len, self.seq_len + 1)  # [B, T + 1]
        return torch.from_numpy(window[:, :-1].astype(np.int64)), torch.from_numpy(window[:, 1:].astype(np.int64))


def num_rows(tokens: Tokens, seq_len: int) -> int:
    """Return how many complete rows of ``seq_len`` inputs a corpus has; the last row's target needs one token more."""
    return max(0, tokens.num_tokens - 1) // seq_len


def require_enough(tokens: Tokens, seq_len: int, rows: int, *, split: str = "train") -> None:
    """Check that a corpus has enough rows for one batch of ``rows`` rows.

    Raises:
        UserError: it does not; the message gives both counts and possible remedies.
    """
    available = num_rows(tokens, seq_len)
    if available < rows:
        raise UserError(
            "data",
            f"the {split} split has {tokens.num_tokens:,} tokens, which make {available:,} rows of seq_len {seq_len}, "
            f"but one batch needs {rows:,} rows ({rows * seq_len + 1:,} tokens)",
            "use more text, or lower seq_len, micro_batch_size, grad_accum_steps or the number of ranks"
            if split == "train"
            else "use more text or a larger data.val_fraction, or lower seq_len",
        )
