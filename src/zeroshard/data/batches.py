"""Batches as a pure function of (step, micro_step): no state to save or replay, and the same rows at any world size.

The global batch of a step has ``G = micro_batch_size * grad_accum_steps * world_size`` rows, and its row ``j`` is
position ``step * G + j`` of the shuffled rows (`zeroshard.data.order`). Rank ``r`` takes, for micro-batch ``m``,

    positions  step * G + (m * world_size + r) * micro_batch_size + [0, micro_batch_size)

so worlds of different sizes that agree on ``G`` train on the same rows at the same step.

Where ``sequence_parallel`` neighbouring ranks share each row, each such group takes the place of a rank above, and each
of its ranks gets its part of the rows: tokens, targets and positions are cut alike.

[Note: The mean over what counts]
    A step's loss is the mean over all counted targets, of all ranks and micro-batches together, as one process with the
    complete global batch would compute it. But a model's loss is the mean over one micro-batch, and micro-batches of
    examples have different numbers of targets. So each loss is multiplied by

        weight = targets of this micro-batch * number of micro-batches of all ranks / targets of the global batch

    before the usual mean over micro-batches and ranks. Every rank can compute which rows all ranks read, so this needs
    no collective. Each row has at least one target, so no loss is a mean over zero targets. Other targets are -100.

    If ranks share rows, a micro-batch's targets are those of a rank's parts. A part may have none: then it gets one, so
    that its loss is a number, and the weight 0.

Shapes: B = micro_batch_size, T = seq_len.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from zeroshard.data import order
from zeroshard.data.base import IGNORED, EvalBatch, Rows, TextRows, part_of
from zeroshard.host.errors import UserError
from zeroshard.host.launch.environment import world_from_env


class RowBatches:
    """Shuffled training batches of one rank; implements `zeroshard.data.Batches`.

    Args:
        grad_accum_steps: micro-batches of each rank per step.
        rank, world_size: the ranks among which the rows of a step are divided; None: this process is alone.
        sequence_parallel: neighbouring ranks that share each row.

    Raises:
        ValueError: a size below 1, a rank outside its world, no row, or no rank in a process that is not alone.
    """

    def __init__(
        self,
        rows: Rows,
        micro_batch_size: int,
        grad_accum_steps: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        sequence_parallel: int = 1,
    ) -> None:
        rank, world_size = given_or_alone(rank, world_size)
        sizes = {"micro_batch_size": micro_batch_size, "grad_accum_steps": grad_accum_steps}
        _check_sizes(rank, world_size, num_rows=rows.num_rows, **sizes)
        self.rows, self._rows_at = rows, partial(order.rows, seed, num_rows=rows.num_rows)
        self.micro_batch_size, self.grad_accum_steps = micro_batch_size, grad_accum_steps
        self.cut = Cut.of(rank, sequence_parallel)
        self.rank, self.world_size = rank // sequence_parallel, world_size // sequence_parallel

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of all ranks in a step, in whole rows."""
        return self.grad_accum_steps * self.world_size

    def __call__(self, step: int, micro_step: int) -> tuple[Tensor, ...]:
        """Return a batch as `zeroshard.data.Batches` does; ValueError if ``micro_step`` is out of range."""
        self._check(micro_step)
        return self.cut(self.rows.read(self._rows(step, micro_step)))

    def weight(self, step: int, micro_step: int) -> Tensor:
        """Return the factor for this rank's loss, 0-dim: [Note: The mean over what counts]."""
        first = step * self.num_micro_batches * self.micro_batch_size
        positions = np.arange(first, first + self.num_micro_batches * self.micro_batch_size)
        total = self.rows.targets_in(self._rows_at(positions)).sum()
        self._check(micro_step)
        rows = self._rows(step, micro_step)
        return self.cut.num_targets(self.rows, rows).double() * (self.num_micro_batches * self.cut.num_ranks) / total

    def _check(self, micro_step: int) -> None:
        if not 0 <= micro_step < self.grad_accum_steps:
            raise ValueError(f"micro_step must be in [0, {self.grad_accum_steps}), got {micro_step}")

    def _rows(self, step: int, micro_step: int) -> NDArray[np.int64]:
        block = step * self.num_micro_batches + micro_step * self.world_size + self.rank
        positions = np.arange(block * self.micro_batch_size, (block + 1) * self.micro_batch_size)
        return self._rows_at(positions)


class EvalBatches:
    """Evaluation batches of one rank: in the order of rows, never shuffled, the same rows at any world size.

    The evaluation set is ``max_rows`` rows, or all rows if there are fewer. The rows are spread evenly over the corpus,
    because neighbouring rows are often alike and one contiguous stretch would not be representative. The set is cut
    into batches of ``micro_batch_size`` rows (the last one may be shorter); rank ``r`` reads batches ``r``, ``r +
    world_size``, and so on.

    Every rank yields the same number of batches, because at stage 3 each forward is a collective. If the batches do not
    divide evenly among the ranks, the ranks that have run out repeat the last batch with weight 0. The mean loss of the
    set is

        sum over ranks and batches of weight * loss  /  sum of weights

    Iterating yields ``(tokens_BT, targets_BT, weight)``, and positions if rows are packed; ``weight`` is the number of
    targets that count (of plain text the number of rows, which all have as many), or 0. It may be iterated repeatedly.

    Args:
        sequence_parallel: neighbouring ranks that share each row.

    Raises:
        ValueError: as `RowBatches`.
    """

    def __init__(
        self,
        rows: Rows,
        micro_batch_size: int,
        max_rows: int,
        rank: int | None = None,
        world_size: int | None = None,
        sequence_parallel: int = 1,
    ) -> None:
        rank, world_size = given_or_alone(rank, world_size)
        sizes = {"micro_batch_size": micro_batch_size, "max_rows": max_rows, "num_rows": rows.num_rows}
        _check_sizes(rank, world_size, **sizes)
        self.rows, self.cut = rows, Cut.of(rank, sequence_parallel)
        self.rank, self.world_size = rank // sequence_parallel, world_size // sequence_parallel
        self.num_rows = min(max_rows, rows.num_rows)
        self._rows = np.arange(self.num_rows, dtype=np.int64) * rows.num_rows // self.num_rows
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
        for turn in range(len(self)):
            batch = turn * self.world_size + self.rank
            first = min(batch, self.num_batches - 1) * self.micro_batch_size
            rows = self._rows[first : first + self.micro_batch_size]
            tokens_BT, targets_BT, *positions = self.cut(self.rows.read(rows))
            weight = self.cut.num_targets(self.rows, rows)
            if isinstance(self.rows, TextRows):  # every position has a target
                weight.fill_(rows.size)
            yield tokens_BT, targets_BT, weight * (batch < self.num_batches), *positions


@dataclass(frozen=True)
class Cut:
    """Which part of each row a rank has."""

    part: int  # its number, from 0
    num_ranks: int  # that share each row; 1: a rank has whole rows

    @classmethod
    def of(cls, rank: int, sequence_parallel: int) -> Cut:
        """Return the part of rank number ``rank``, where ``sequence_parallel`` neighbouring ranks share each row."""
        return cls(rank % sequence_parallel, sequence_parallel)

    def __call__(self, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return this part of tokens, targets and what else there is, [B, T] each: [B, T / num_ranks], contiguous."""
        if self.num_ranks == 1:
            return whole
        tokens, targets, *others = (part_of(each, self.part, self.num_ranks).contiguous() for each in whole)
        if not bool((targets != IGNORED).any()):
            targets[0, 0] = 0  # [Note: The mean over what counts]
        return tokens, targets, *others

    def num_targets(self, rows: Rows, chosen: NDArray[np.int64]) -> Tensor:
        """Return how many targets of this part of the ``chosen`` rows count, 0-dim."""
        if self.num_ranks == 1:
            return torch.tensor(int(rows.targets_in(chosen).sum()))
        return (part_of(rows.read(chosen)[1], self.part, self.num_ranks) != IGNORED).sum()


def require_rows(rows: Rows, wanted: int) -> None:
    """Check that training has enough rows for one batch of ``wanted`` rows; else raise a UserError with both counts."""
    if rows.num_rows < wanted:
        what = f"the train split has {rows.num_rows:,} rows of examples, but one batch needs {wanted:,}"
        todo = "use more examples, or lower micro_batch_size, grad_accum_steps or the number of ranks"
        raise UserError("data", what, todo)


def given_or_alone(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks that were given, or those of a process that is alone.

    Raises:
        ValueError: one is None, and this process is one of several: each would read the same rows.
    """
    if rank is None or world_size is None:
        joined, world = dist.is_available() and dist.is_initialized(), world_from_env()
        num_ranks = dist.get_world_size() if joined else world.world_size if world else 1
        if num_ranks > 1:
            what = f"rank and world_size: not given in one of {num_ranks} processes, which would all read the same rows"
            raise ValueError(f"{what}; give this process's, or rank=0, world_size=1 if each trains alone")
    return 0 if rank is None else rank, 1 if world_size is None else world_size


def _check_sizes(rank: int, world_size: int, **sizes: int) -> None:
    """Raise ValueError for a size below 1, or for a rank outside its world."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
