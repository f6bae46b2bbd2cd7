"""Batches as a pure function of (step, micro_step): no state to save or replay, and the same rows at any world size.

The global batch of a step has ``G = micro_batch_size * grad_accum_steps * world_size`` rows, and its row ``j`` is
position ``step * G + j`` of the shuffled stream (`zeroshard.data.order`). Rank ``r`` takes, for micro-batch ``m``,

    positions  step * G + (m * world_size + r) * micro_batch_size + [0, micro_batch_size)

so worlds of different sizes that agree on ``G`` train on the same rows at the same step.

Shapes: B = micro_batch_size, T = seq_len. Row ``i`` of a corpus is tokens ``[i * T, i * T + T + 1)``: the first T are
the inputs, the last T (shifted by one) are the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.data import order
from zeroshard.errors import UserError

# Tokens, targets, weight; and positions if rows are packed.
EvalBatch = tuple[Tensor, Tensor, int, *tuple[Tensor, ...]]


def as_arguments(positions: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the model's keyword arguments other than tokens and targets, from a batch's tensors after those two."""
    return {"positions_BT": positions[0]} if positions else {}


class Batches(Protocol):
    """Training batches as a function of the step: to resume, call it with a later step."""

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, ...]:
        """Return ``(tokens_BT, targets_BT)``, int64, on the CPU; always the same for the same arguments.

        If rows contain several examples that must not attend to each other, there is a third tensor ``positions_BT``,
        int64, which counts from 0 in each example: see `as_arguments`.
        """
        ...


class Tokens(Protocol):
    """A stream of token ids with random access: the part of a corpus that batches depend on.

    A stream on a disk may also have a method ``read_ahead(starts, lengths)``, which begins to fetch these windows and
    returns at once.
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the stream."""
        ...

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.unsignedinteger]:
        """Return ``[len(starts), length]``: the ``length`` tokens from each start."""
        ...


class ReadAhead:
    """Computes the rows of each micro-batch and prefetches the next one's from disk, while this one is trained on.

    Args:
        rows: returns the rows of (step, micro_step); a pure function.
        grad_accum_steps: micro-steps per step.
        read_ahead: begins to fetch rows, and returns at once.
    """

    def __init__(
        self,
        rows: Callable[[int, int], NDArray[np.int64]],
        grad_accum_steps: int,
        read_ahead: Callable[[NDArray[np.int64]], None],
    ) -> None:
        self._rows, self._grad_accum_steps, self._read_ahead = rows, grad_accum_steps, read_ahead
        self._known: dict[tuple[int, int], NDArray[np.int64]] = {}  # rows whose fetch has begun

    def __call__(self, step: int, micro_step: int) -> NDArray[np.int64]:
        """Return the rows; begin to fetch them and the next micro-batch's, unless that has begun."""
        wraps = micro_step + 1 == self._grad_accum_steps
        following = (step + 1, 0) if wraps else (step, micro_step + 1)
        before, self._known = self._known, {}
        for place in ((step, micro_step), following):
            rows = before.get(place)
            if rows is None:
                rows = self._rows(*place)
                self._read_ahead(rows)
            self._known[place] = rows
        return self._known[step, micro_step]


class TokenBatches:
    """Shuffled training batches of one rank; implements `Batches`.

    Raises:
        ValueError: a size below 1, a rank outside its world, or fewer than ``seq_len + 1`` tokens.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        micro_batch_size: int,
        grad_accum_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        check_sizes(
            rank,
            world_size,
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            grad_accum_steps=grad_accum_steps,
        )
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.micro_batch_size, self.grad_accum_steps = micro_batch_size, grad_accum_steps
        self.rank, self.world_size = rank, world_size
        self.num_rows = num_rows(tokens, seq_len)
        self._ahead = ReadAhead(self._rows, grad_accum_steps, partial(read_rows_ahead, tokens, seq_len=seq_len))
        if self.num_rows < 1:
            raise ValueError(f"{tokens.num_tokens} tokens hold no row of seq_len {seq_len}: {seq_len + 1} are needed")

    @property
    def global_batch_size(self) -> int:
        """Number of rows that all ranks together read per step."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """Return ``(tokens_BT, targets_BT)``, int64, on the CPU. ValueError if ``micro_step`` is out of range."""
        if not 0 <= micro_step < self.grad_accum_steps:
            raise ValueError(f"micro_step must be in [0, {self.grad_accum_steps}), got {micro_step}")
        return _read_rows(self.tokens, self._ahead(step, micro_step), self.seq_len)

    def _rows(self, step: int, micro_step: int) -> NDArray[np.int64]:
        block = micro_step * self.world_size + self.rank
        first = step * self.global_batch_size + block * self.micro_batch_size
        positions = np.arange(first, first + self.micro_batch_size)
        return order.rows(self.seed, positions, self.num_rows)


class EvalBatches:
    """Evaluation batches of one rank: in corpus order, never shuffled, the same rows at any world size.

    The evaluation set is ``max_rows`` rows, or all rows if the corpus has fewer. The rows are spread evenly over the
    corpus, because neighbouring rows are often alike and one contiguous stretch would not be representative. The set is
    cut into batches of ``micro_batch_size`` rows (the last one may be shorter); rank ``r`` reads batches ``r``, ``r +
    world_size``, and so on.

    Every rank yields the same number of batches, because at stage 3 each forward is a collective. If the batches do not
    divide evenly among the ranks, the ranks that have run out repeat the last batch with weight 0. The mean loss of the
    set is

        sum over ranks and batches of weight * loss  /  sum of weights

    Iterating yields ``(tokens_BT, targets_BT, weight)``, where ``weight`` is the number of rows in the batch, or 0. It
    may be iterated repeatedly.

    Raises:
        ValueError: a size below 1, a rank outside its world, or fewer than ``seq_len + 1`` tokens.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        micro_batch_size: int,
        max_rows: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_sizes(rank, world_size, seq_len=seq_len, micro_batch_size=micro_batch_size, max_rows=max_rows)
        available = num_rows(tokens, seq_len)
        if available < 1:
            raise ValueError(f"{tokens.num_tokens} tokens hold no row of seq_len {seq_len}: {seq_len + 1} are needed")
        self.tokens, self.seq_len = tokens, seq_len
        self.num_rows = min(max_rows, available)
        self.micro_batch_size = min(micro_batch_size, self.num_rows)
        self.num_batches = -(-self.num_rows // self.micro_batch_size)
        self.rank, self.world_size = rank, world_size
        self._rows = np.arange(self.num_rows, dtype=np.int64) * available // self.num_rows

    def __len__(self) -> int:
        """Number of batches that each rank yields, including those of weight 0."""
        return -(-self.num_batches // self.world_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        for rows, counts in eval_turns(self._rows, self.micro_batch_size, self.rank, self.world_size):
            read_rows_ahead(self.tokens, rows, self.seq_len)  # fetch all rows at once; reading waits for each in turn
            yield *_read_rows(self.tokens, rows, self.seq_len), rows.size if counts else 0


def eval_turns(
    rows: NDArray[np.int64], micro_batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """Yield the rows of each batch of a rank, and whether they count: ranks that have run out repeat the last batch."""
    num_batches = -(-rows.size // micro_batch_size)
    for turn in range(-(-num_batches // world_size)):
        batch = turn * world_size + rank
        first = min(batch, num_batches - 1) * micro_batch_size
        yield rows[first : first + micro_batch_size], batch < num_batches


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


def _read_rows(tokens: Tokens, rows: NDArray[np.int64], seq_len: int) -> tuple[Tensor, Tensor]:
    window = tokens.gather(rows * seq_len, seq_len + 1)  # [B, T + 1]
    return torch.from_numpy(window[:, :-1].astype(np.int64)), torch.from_numpy(window[:, 1:].astype(np.int64))


def read_rows_ahead(tokens: Tokens, rows: NDArray[np.int64], seq_len: int) -> None:
    """Begin to fetch rows that will be read soon, if the stream can; return at once."""
    read_ahead = getattr(tokens, "read_ahead", None)
    if read_ahead is not None:
        read_ahead(rows * seq_len, seq_len + 1)


def check_sizes(rank: int, world_size: int, **sizes: int) -> None:
    """Raise ValueError for a size below 1, or for a rank outside its world."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
