"""Batches as a pure function of (step, micro_step): nothing to save, nothing to replay, the same at any world size.

The global batch of a step has ``G = micro_batch_size * grad_accum_steps * world_size`` rows, and its row ``j`` is
position ``step * G + j`` of the shuffled stream (`zeroshard.data.order`). Rank ``r`` takes, for micro-batch ``m``,

    positions  step * G + (m * world_size + r) * micro_batch_size + [0, micro_batch_size)

so worlds of different sizes that agree on ``G`` train on the same rows at the same step.

Shapes: B = micro_batch_size, T = seq_len. Row ``i`` of a corpus is tokens ``[i * T, i * T + T + 1)``: T inputs, and the
same shifted by one as targets.
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

# Tokens, targets, weight, and of packed rows positions.
EvalBatch = tuple[Tensor, Tensor, int, *tuple[Tensor, ...]]


def as_arguments(positions: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a model is called with beside tokens and targets: ``positions`` are what a batch has behind these."""
    return {"positions_BT": positions[0]} if positions else {}


class Batches(Protocol):
    """Training batches: to resume is to call with a later step."""

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, ...]:
        """``(tokens_BT, targets_BT)``, int64, on the CPU; the same for the same arguments, always.

        Where rows hold several examples that must not see each other, a third tensor is ``positions_BT``, int64, which
        counts from 0 in each of them: see `as_arguments`.
        """
        ...


class Tokens(Protocol):
    """A stream of token ids with random access: what batches need to know of a corpus.

    One that lies on a disk may have a method ``read_ahead(starts, lengths)``, which begins to fetch these windows and
    returns at once.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""
        ...

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.unsignedinteger]:
        """``[len(starts), length]``: the ``length`` tokens from each start."""
        ...


class ReadAhead:
    """The rows of each micro-batch, and word of those of the next one: disks fetch it while this one is trained on.

    Args:
        rows: of a step and a micro-step, a pure function.
        grad_accum_steps: micro-steps of a step.
        read_ahead: begins to fetch rows, and returns at once.
    """

    def __init__(
        self,
        rows: Callable[[int, int], NDArray[np.int64]],
        grad_accum_steps: int,
        read_ahead: Callable[[NDArray[np.int64]], None],
    ) -> None:
        self._rows, self._grad_accum_steps, self._read_ahead = rows, grad_accum_steps, read_ahead
        self._known: dict[tuple[int, int], NDArray[np.int64]] = {}  # that are being fetched

    def __call__(self, step: int, micro_step: int) -> NDArray[np.int64]:
        """The rows; all that are not yet being fetched begin to be."""
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
        """Rows that all ranks together read per step."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        """``(tokens_BT, targets_BT)``, int64, on the CPU. A ValueError where ``micro_step`` is out of range."""
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

    The set is ``max_rows`` rows, or all that the corpus holds, spread evenly over it: neighbouring rows are often
    alike, so that a stretch of them would stand for little. It is cut into batches of ``micro_batch_size`` rows, the
    last one maybe shorter; rank ``r`` reads batches ``r``, ``r + world_size``, and so on.

    Every rank yields the same number of batches, because at stage 3 each forward is a collective: where the world
    does not divide the set, the ranks that ran out repeat the last batch with weight 0. The mean loss of the set is

        sum over ranks and batches of weight * loss  /  sum of weights

    Iterating yields ``(tokens_BT, targets_BT, weight)`` with ``weight`` the rows of the batch, or 0; it may be iterated
    again and again.

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
        """Batches that each rank yields, those of weight 0 included."""
        return -(-self.num_batches // self.world_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        for rows, counts in eval_turns(self._rows, self.micro_batch_size, self.rank, self.world_size):
            read_rows_ahead(self.tokens, rows, self.seq_len)  # side by side, where a reader would wait for one by one
            yield *_read_rows(self.tokens, rows, self.seq_len), rows.size if counts else 0


def eval_turns(
    rows: NDArray[np.int64], micro_batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """The rows of each of a rank's batches, and whether they count: ranks that ran out repeat the last batch."""
    num_batches = -(-rows.size // micro_batch_size)
    for turn in range(-(-num_batches // world_size)):
        batch = turn * world_size + rank
        first = min(batch, num_batches - 1) * micro_batch_size
        yield rows[first : first + micro_batch_size], batch < num_batches


def num_rows(tokens: Tokens, seq_len: int) -> int:
    """Whole rows of ``seq_len`` tokens and their targets in a corpus: the last target needs one token more."""
    return max(0, tokens.num_tokens - 1) // seq_len


def require_enough(tokens: Tokens, seq_len: int, rows: int, *, split: str = "train") -> None:
    """See that a corpus feeds one batch of ``rows`` rows.

    Raises:
        UserError: it does not; the line gives both counts and the ways out.
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
    """Begin to fetch rows that are read soon, where the stream knows how; return at once."""
    read_ahead = getattr(tokens, "read_ahead", None)
    if read_ahead is not None:
        read_ahead(rows * seq_len, seq_len + 1)


def check_sizes(rank: int, world_size: int, **sizes: int) -> None:
    """Raise ValueError for a size below 1, or a rank outside its world."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
