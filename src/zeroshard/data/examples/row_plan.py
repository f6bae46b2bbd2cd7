"""Which examples make which row of a run's length: one each, or several packed into one.

An example of ``n`` tokens gives ``n - 1`` inputs, each with the token after it as its target. It is cut after
``seq_len`` inputs, or left out; so is one that has no target that counts, for its prompt fills the row.

Shapes: B rows, T = seq_len.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.data.examples.packing import pack
from zeroshard.data.examples.plain import Documents
from zeroshard.data.examples.store import Examples
from zeroshard.data.meta import read_meta
from zeroshard.data.tokens import TokenDataset
from zeroshard.errors import UserError

IGNORED = -100  # as in torch's cross_entropy


@dataclass(frozen=True)
class ExampleRows:
    """Rows, each of one example or more; implements `zeroshard.data.row_sets.Rows`.

    Attributes:
        examples: where they are read from.
        seq_len: T, inputs of a row.
        first: for each row the first of its members, and one entry more, [num_rows + 1].
        members: examples of the rows, row after row.
        num_targets: for each row how many of its targets count, [num_rows]; at least 1.
        num_inputs: for each row how many of its T tokens are of examples, [num_rows].
        num_cut: examples that are longer than a row and cut.
        num_dropped: examples that are in no row.
        packed: rows tell where examples begin, so that attention stays inside each.
    """

    examples: Examples | Documents
    seq_len: int
    first: NDArray[np.int64]
    members: NDArray[np.int64]
    num_targets: NDArray[np.int64]
    num_inputs: NDArray[np.int64]
    num_cut: int
    num_dropped: int
    packed: bool = False

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self.num_targets.size

    @property
    def share_filled(self) -> float:
        """Of all positions those that hold a token of an example, in (0, 1]."""
        return float(self.num_inputs.sum() / (self.num_rows * self.seq_len))

    def targets_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each of ``rows`` how many of its targets count."""
        return self.num_targets[rows]

    def inputs_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each of ``rows`` how many of its tokens are of examples."""
        return self.num_inputs[rows]

    def read(self, wanted: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """``(tokens_BT, targets_BT)``, int64; of packed rows ``positions_BT`` too, from 0 in each example.

        What is behind the last example of a row is id 0 without a target, an example of its own.
        """
        shape = (wanted.size, self.seq_len)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.tile(np.arange(self.seq_len), (wanted.size, 1))
        examples, begins = self.examples, self.examples.begins
        for index, row in enumerate(wanted.tolist()):
            at = 0
            for example in self.members[self.first[row] : self.first[row + 1]].tolist():
                begin = int(begins[example])
                length = min(int(examples.ends[example]) - begin - 1, self.seq_len - at)
                ids = examples.tokens.window(begin, length + 1).astype(np.int64)
                tokens[index, at : at + length] = ids[:-1]
                if examples.counts is None:
                    targets[index, at : at + length] = ids[1:]
                else:
                    counts = examples.counts[begin + 1 : begin + 1 + length] != 0
                    targets[index, at : at + length][counts] = ids[1:][counts]
                at += length
                positions[index, at:] -= positions[index, at] if at < self.seq_len else 0
        found = (torch.from_numpy(tokens), torch.from_numpy(targets))
        return (*found, torch.from_numpy(positions)) if self.packed else found

    def read_ahead(self, wanted: NDArray[np.int64]) -> None:
        """Begin to fetch the ids of their members; return at once."""
        members = [self.members[self.first[row] : self.first[row + 1]] for row in wanted.tolist()]
        chosen = np.concatenate([np.empty(0, np.int64), *members])
        begins = self.examples.begins[chosen]
        self.examples.tokens.read_ahead(begins, self.examples.ends[chosen] - begins)

    def in_words(self) -> str:
        """``1,200 examples in 321 rows, 96.1 % full``; full of tokens, the rest is padding."""
        kind, rows = ("pieces of documents" if self.examples.counts is None else "examples"), self.num_rows
        return f"{self.members.size:,} {kind} in {rows:,} rows, {self.share_filled:.1%} full".replace("%", " %")

    def said(self, split: str) -> str:
        """What became of examples that do not fit, in a line; empty where all do."""
        if not self.num_cut and not self.num_dropped:
            return ""
        cut = f"{self.num_cut:,} are cut to seq_len = {self.seq_len:,}"
        left_out = f"{self.num_dropped:,} are left out (too long, or all prompt)"
        return f"data: of the {self.examples.num_examples:,} examples of the {split} split {cut} and {left_out}"


def rows_in(
    folder: Path, split: str, seq_len: int, *, named: str = "", cut: bool = True, packed: bool = False
) -> ExampleRows:
    """The rows of a prepared folder: of its examples, or packed of documents of plain text.

    Args:
        folder, split: of prepared data.
        named: the split in a refusal, where ``split`` says too little.
        seq_len, cut, packed: as of `rows_of_length`.

    Raises:
        UserError: as there; or nothing ends the documents.
    """
    meta = read_meta(folder)
    if meta.examples:
        return rows_of_length(Examples(folder, split), seq_len, split=named or split, cut=cut, packed=packed)
    if meta.eos_id is None:
        what = f"the tokenizer of {folder} ({meta.tokenizer}) has no id that ends a document"
        raise UserError("data.packing", what, "use one that has, as gpt2 or bpe:N, or leave it out")
    documents = Documents(TokenDataset.open(folder, split), meta.eos_id, seq_len)
    return rows_of_length(documents, seq_len, split=named or split, packed=packed)


def rows_of_length(
    examples: Examples | Documents, seq_len: int, *, split: str, cut: bool = True, packed: bool = False
) -> ExampleRows:
    """The rows of a split; the same on every rank.

    Args:
        examples: of the split.
        seq_len: inputs of a row.
        split: its name, for a refusal.
        cut: examples that are too long are cut; else left out.
        packed: several examples to a row, see `zeroshard.data.examples.packing`; else one.

    Raises:
        UserError: no example is left.
    """
    lengths = examples.ends - examples.begins - 1  # inputs
    too_long = lengths > seq_len
    inputs = np.minimum(lengths, seq_len)
    num_targets = _num_targets(examples, inputs)
    kept = num_targets > 0 if cut else (num_targets > 0) & ~too_long
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
        examples, seq_len, first, members, in_row, filled, int((too_long & kept).sum()), left_out, packed
    )


def _num_targets(examples: Examples | Documents, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each example, cut to ``lengths`` inputs, how many targets count."""
    if examples.counts is None:
        return lengths
    if not examples.num_examples:
        return np.zeros(0, np.int64)
    begin = examples.begins + 1  # the first token is nobody's target
    bounds = np.stack((begin, begin + lengths), axis=1).reshape(-1)
    padded = np.concatenate((examples.counts, np.zeros(1, np.uint8)))  # an index may be the end
    sums = np.add.reduceat(padded, bounds, dtype=np.int64)[::2]
    return np.where(lengths > 0, sums, 0)
