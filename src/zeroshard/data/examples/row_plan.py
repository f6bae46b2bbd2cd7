"""Decide which examples make up which row of ``seq_len`` tokens: one example per row, or several packed into one.

An example of ``n`` tokens gives ``n - 1`` inputs, each with the next token as its target. If it is longer than
``seq_len`` inputs, it is cut. An example without a counted target (for example because its prompt fills the
row) is left out.

Shapes: B rows, T = seq_len.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.data.base import IGNORED, Rows, TextRows, require_enough
from zeroshard.data.examples.packing import pack
from zeroshard.data.examples.store import Examples, require_plain
from zeroshard.data.meta import read_meta
from zeroshard.data.tokens import TokenDataset
from zeroshard.host.errors import UserError


@dataclass(frozen=True)
class ExampleRows:
    """Rows of one or more examples each; implements `zeroshard.data.base.Rows`."""

    examples: Examples  # the examples that rows are read from
    seq_len: int  # T, inputs per row
    # for each row the index of its first entry in ``members``, then their number, [num_rows + 1]
    first: NDArray[np.int64]
    members: NDArray[np.int64]  # the examples of the rows, row after row
    num_targets: NDArray[np.int64]  # for each row how many of its targets count, [num_rows]; at least 1
    num_inputs: NDArray[np.int64]  # for each row how many of its T tokens belong to examples, [num_rows]
    num_cut: int  # number of examples that are longer than a row and are cut
    num_dropped: int  # number of examples that are in no row
    packed: bool = False  # whether rows come with positions, so that attention stays inside each example

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.num_targets.size

    @property
    def share_filled(self) -> float:
        """The share of all positions that hold a token of an example, in (0, 1]."""
        return float(self.num_inputs.sum() / (self.num_rows * self.seq_len))

    def targets_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of ``rows`` how many of its targets count."""
        return self.num_targets[rows]

    def read(self, wanted: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return ``(tokens_BT, targets_BT)``, int64; for packed rows also ``positions_BT``, from 0 in each example.

        The padding after the last example of a row has id 0 and no targets, and counts as an example of its own.
        """
        shape = (wanted.size, self.seq_len)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.tile(np.arange(self.seq_len), (wanted.size, 1))
        examples, begins = self.examples, self.examples.begins
        chosen = np.concatenate([self.members[self.first[row] : self.first[row + 1]] for row in wanted.tolist()])
        examples.tokens.read_ahead(begins[chosen], examples.ends[chosen] - begins[chosen])
        for index, row in enumerate(wanted.tolist()):
            at = 0
            for example in self.members[self.first[row] : self.first[row + 1]].tolist():
                begin = int(begins[example])
                length = min(int(examples.ends[example]) - begin - 1, self.seq_len - at)
                ids = examples.tokens.window(begin, length + 1).astype(np.int64)
                tokens[index, at : at + length] = ids[:-1]
                counts = examples.counts[begin + 1 : begin + 1 + length] != 0
                targets[index, at : at + length][counts] = ids[1:][counts]
                at += length
                positions[index, at:] -= positions[index, at] if at < self.seq_len else 0
        found = (torch.from_numpy(tokens), torch.from_numpy(targets))
        return (*found, torch.from_numpy(positions)) if self.packed else found

    def in_words(self) -> str:
        """Return such as ``1,200 examples in 321 rows, 96.1 % full``; the rest of the rows is padding."""
        rows = self.num_rows
        return f"{self.members.size:,} examples in {rows:,} rows, {self.share_filled:.1%} full".replace("%", " %")

    def said(self, split: str) -> str:
        """Return a line about examples that are cut or left out; empty if there are none."""
        if not self.num_cut and not self.num_dropped:
            return ""
        cut = f"{self.num_cut:,} are cut to seq_len = {self.seq_len:,}"
        left_out = f"{self.num_dropped:,} are left out (all prompt)"
        return f"data: of the {self.examples.num_examples:,} examples of the {split} split {cut} and {left_out}"


def rows_of_folder(
    folder: Path,
    split: str,
    seq_len: int,
    *,
    named: str = "",
    packed: bool = False,
    of_examples: bool | None = None,
    at_least: int = 1,
) -> Rows:
    """Return the rows of a prepared folder, of examples or of plain text; the same on every rank.

    Args:
        folder, split: the folder and split of prepared data.
        seq_len, packed: as for `rows_of_length`.
        named: how error messages name the split, if ``split`` alone is not clear.
        of_examples: whether the folder must have examples, or must have none; None: whichever it has.
        at_least: rows of plain text that are needed.

    Raises:
        UserError: it has something else, no example is left, or the text is too short.
    """
    if of_examples is False:
        require_plain(folder, read_meta(folder))
    if of_examples or (of_examples is None and read_meta(folder).examples):
        return rows_of_length(Examples(folder, split), seq_len, split=named or split, packed=packed)
    tokens = TokenDataset.open(folder, split)
    require_enough(tokens, seq_len, at_least, split=named or split)
    return TextRows(tokens, seq_len)


def rows_of_length(examples: Examples, seq_len: int, *, split: str, packed: bool = False) -> ExampleRows:
    """Return the rows of a split; the same on every rank.

    Args:
        seq_len: inputs per row.
        split: its name, for error messages.
        packed: True: several examples per row, see `zeroshard.data.examples.packing`. False: one.

    Raises:
        UserError: no example is left.
    """
    lengths = examples.ends - examples.begins - 1  # number of inputs
    inputs = np.minimum(lengths, seq_len)
    num_targets = _num_targets(examples, inputs)
    kept = num_targets > 0
    members = np.flatnonzero(kept)
    if not members.size:
        what = f"no example of the {split} split has a target within {seq_len:,} tokens"
        raise UserError("seq_len", what, "raise it, or give shorter prompts")
    first = np.arange(members.size + 1)
    if packed:
        first, chosen = pack(inputs[members], seq_len)
        members = members[chosen]
    in_row, filled = (np.add.reduceat(each[members], first[:-1]) for each in (num_targets, inputs))
    left_out = int(kept.size - kept.sum())
    return ExampleRows(
        examples, seq_len, first, members, in_row, filled, int(((lengths > seq_len) & kept).sum()), left_out, packed
    )


def _num_targets(examples: Examples, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each example, cut to ``lengths`` inputs, how many of its targets count."""
    if not examples.num_examples:
        return np.zeros(0, np.int64)
    begin = examples.begins + 1  # the first token is no target
    bounds = np.stack((begin, begin + lengths), axis=1).reshape(-1)
    padded = np.concatenate((examples.counts, np.zeros(1, np.uint8)))  # `reduceat` needs indices inside
    sums = np.add.reduceat(padded, bounds, dtype=np.int64)[::2]
    return np.where(lengths > 0, sums, 0)
