"""Which examples make which row of a run's length: one each, or several packed into one.

An example of ``n`` tokens gives ``n - 1`` inputs, each with the token after it as its target. It is cut after
``seq_len`` inputs, or left out; so is one that has no target that counts, for its prompt fills the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.examples.store import Examples
from zeroshard.errors import UserError


@dataclass(frozen=True)
class ExampleRows:
    """Rows, each of one example or more.

    Attributes:
        examples: where they are read from.
        seq_len: T, inputs of a row.
        first: for each row the first of its members, and one entry more, [num_rows + 1].
        members: examples of the rows, row after row.
        num_targets: for each row how many of its targets count, [num_rows]; at least 1.
        num_cut: examples that are longer than a row and cut.
        num_dropped: examples that are in no row.
    """

    examples: Examples
    seq_len: int
    first: NDArray[np.int64]
    members: NDArray[np.int64]
    num_targets: NDArray[np.int64]
    num_cut: int
    num_dropped: int

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self.num_targets.size

    def said(self, split: str) -> str:
        """What became of examples that do not fit, in a line; empty where all do."""
        if not self.num_cut and not self.num_dropped:
            return ""
        cut = f"{self.num_cut:,} are cut to seq_len = {self.seq_len:,}"
        left_out = f"{self.num_dropped:,} are left out (too long, or all prompt)"
        return f"data: of the {self.examples.num_examples:,} examples of the {split} split {cut} and {left_out}"


def rows_of_length(examples: Examples, seq_len: int, *, split: str, cut: bool = True) -> ExampleRows:
    """The rows of a split; the same on every rank.

    Args:
        examples: of the split.
        seq_len: inputs of a row.
        split: its name, for a refusal.
        cut: examples that are too long are cut; else left out.

    Raises:
        UserError: no example is left.
    """
    lengths = examples.ends - examples.begins - 1  # inputs
    too_long = lengths > seq_len
    num_targets = _num_targets(examples, np.minimum(lengths, seq_len))
    kept = num_targets > 0 if cut else (num_targets > 0) & ~too_long
    members = np.flatnonzero(kept)
    if not members.size:
        what = f"no example of the {split} split has a target within {seq_len:,} tokens"
        raise UserError("seq_len", what, "raise it, or give shorter prompts")
    first = np.arange(members.size + 1)
    in_row = np.add.reduceat(num_targets[members], first[:-1])
    return ExampleRows(
        examples, seq_len, first, members, in_row, int((too_long & kept).sum()), int(kept.size - kept.sum())
    )


def _num_targets(examples: Examples, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each example, cut to ``lengths`` inputs, how many targets count."""
    if not examples.num_examples:
        return np.zeros(0, np.int64)
    begin = examples.begins + 1  # the first token is nobody's target
    bounds = np.stack((begin, begin + lengths), axis=1).reshape(-1)
    padded = np.concatenate((examples.counts, np.zeros(1, np.uint8)))  # an index may be the end
    sums = np.add.reduceat(padded, bounds, dtype=np.int64)[::2]
    return np.where(lengths > 0, sums, 0)
