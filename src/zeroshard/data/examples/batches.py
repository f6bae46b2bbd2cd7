"""Batches of rows with different numbers of counted targets: as `zeroshard.data.base`, with -100 for other targets.

[Note: The mean over what counts]
    A step's loss is the mean over all counted targets, of all ranks and micro-batches together, as one process with the
    complete global batch would compute it. But a model's loss is the mean over one micro-batch, and micro-batches have
    different numbers of targets. So each loss is multiplied by

        weight = targets of this micro-batch * number of micro-batches of all ranks / targets of the global batch

    before the usual mean over micro-batches and ranks. Every rank can compute which rows all ranks read, so this needs
    no collective. Each row has at least one target, so no loss is a mean over zero targets.

Shapes: B = micro_batch_size, T = seq_len.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.data import order
from zeroshard.data.base import EvalBatch, ReadAhead, check_sizes, eval_turns
from zeroshard.data.row_sets import Rows
from zeroshard.errors import UserError

RowsAt = Callable[[NDArray[np.int64]], NDArray[np.int64]]


class ExampleBatches:
    """Shuffled training batches of one rank; implements `zeroshard.data.Batches`.

    Args:
        rows: the rows to read.
        micro_batch_size, grad_accum_steps, rank, world_size, seed: as for `zeroshard.data.TokenBatches`.
        rows_at: returns the rows at training positions; None: a shuffle of ``rows`` by ``seed``.
    """

    def __init__(
        self,
        rows: Rows,
        micro_batch_size: int,
        grad_accum_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        rows_at: RowsAt | None = None,
    ) -> None:
        check_sizes(rank, world_size, micro_batch_size=micro_batch_size, grad_accum_steps=grad_accum_steps)
        self.rows, self._rows_at = rows, rows_at or partial(order.rows, seed, num_rows=rows.num_rows)
        self.micro_batch_size, self.grad_accum_steps = micro_batch_size, grad_accum_steps
        self.rank, self.world_size = rank, world_size
        self._ahead = ReadAhead(self._rows, grad_accum_steps, rows.read_ahead)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of all ranks in a step."""
        return self.grad_accum_steps * self.world_size

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, ...]:
        """Return a batch as `zeroshard.data.Batches` does; ValueError if ``micro_step`` is out of range."""
        self._check(micro_step)
        return self.rows.read(self._ahead(step, micro_step))

    def weight(self, step: int, micro_step: int) -> float:
        """Return the factor for this rank's loss: [Note: The mean over what counts]."""
        first = step * self.num_micro_batches * self.micro_batch_size
        positions = np.arange(first, first + self.num_micro_batches * self.micro_batch_size)
        total = self.rows.targets_in(self._rows_at(positions)).sum()
        self._check(micro_step)
        own = self.rows.targets_in(self._rows(step, micro_step)).sum()
        return float(own * self.num_micro_batches / total)

    def _check(self, micro_step: int) -> None:
        if not 0 <= micro_step < self.grad_accum_steps:
            raise ValueError(f"micro_step must be in [0, {self.grad_accum_steps}), got {micro_step}")

    def _rows(self, step: int, micro_step: int) -> NDArray[np.int64]:
        block = step * self.num_micro_batches + micro_step * self.world_size + self.rank
        positions = np.arange(block * self.micro_batch_size, (block + 1) * self.micro_batch_size)
        return self._rows_at(positions)


class ExampleEvalBatches:
    """Evaluation batches of one rank, as `zeroshard.data.EvalBatches`; a batch's weight is its number of targets.

    Args:
        rows: the rows to read.
        micro_batch_size, max_rows, rank, world_size: as for `zeroshard.data.EvalBatches`.
        chosen: the rows to evaluate on; None: ``max_rows``, spread evenly over all rows.
    """

    def __init__(
        self,
        rows: Rows,
        micro_batch_size: int,
        max_rows: int,
        rank: int = 0,
        world_size: int = 1,
        chosen: NDArray[np.int64] | None = None,
    ) -> None:
        check_sizes(rank, world_size, micro_batch_size=micro_batch_size, max_rows=max_rows)
        self.rows, self.rank, self.world_size = rows, rank, world_size
        if chosen is None:
            num_rows = min(max_rows, rows.num_rows)
            chosen = np.arange(num_rows, dtype=np.int64) * rows.num_rows // num_rows
        self._rows, self.num_rows = chosen, chosen.size
        self.micro_batch_size = min(micro_batch_size, self.num_rows)
        self.num_batches = -(-self.num_rows // self.micro_batch_size)

    @property
    def num_targets(self) -> int:
        """Number of targets that count, of all ranks together."""
        return int(self.rows.targets_in(self._rows).sum())

    def __len__(self) -> int:
        """Number of batches that each rank yields, including those of weight 0."""
        return -(-self.num_batches // self.world_size)

    def __iter__(self) -> Iterator[EvalBatch]:
        for rows, counts in eval_turns(self._rows, self.micro_batch_size, self.rank, self.world_size):
            self.rows.read_ahead(rows)  # fetch all rows at once; reading waits for each in turn
            tokens_BT, targets_BT, *positions = self.rows.read(rows)
            yield tokens_BT, targets_BT, int(self.rows.targets_in(rows).sum()) if counts else 0, *positions


def require_rows(rows: Rows, wanted: int, *, split: str = "train") -> None:
    """Check that a split has enough rows for one batch of ``wanted`` rows; else raise a UserError with both counts."""
    if rows.num_rows < wanted:
        what = f"the {split} split has {rows.num_rows:,} rows of examples, but one batch needs {wanted:,}"
        todo = "use more examples, or lower micro_batch_size, grad_accum_steps or the number of ranks"
        raise UserError("data", what, todo)
