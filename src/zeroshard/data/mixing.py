"""Mix several sources by weight: the source and the row at each training position, as a pure function of the position.

The row at position ``p`` of training comes from source ``i`` with probability ``w_i / sum(w)``, decided by a random
number that depends only on the seed and ``p``. Within its source it is the next row of a shuffle that takes each row
once per epoch. The number of a source's rows before ``p`` is counted from those random numbers, in blocks, each counted
once. So nothing has to be saved, and a run that resumes at any number of ranks takes the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.data import order
from zeroshard.data.base import Rows, TextRows

_BLOCK = 1 << 12  # positions that are counted together
_AT_ONCE = 1 << 8  # blocks that are counted together
_COUNTED = 1 << 22  # rows that are counted exactly; estimates for longer runs are extrapolated from them


class JoinedRows:
    """The rows of several sources, numbered one source after the other; implements `zeroshard.data.base.Rows`.

    Args:
        parts: the sources; all are packed, or none is.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = list(parts)
        self.sizes = [part.num_rows for part in parts]
        self.firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.sizes)))  # [num_parts + 1]

    @property
    def num_rows(self) -> int:
        """Rows of all sources together."""
        return int(self.firsts[-1])

    def targets_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of ``rows`` how many of its targets count."""
        found = np.empty(rows.shape, np.int64)
        for part, mine, local in self._shared_out(rows):
            found[mine] = part.targets_in(local)
        return found

    def inputs_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of ``rows`` how many of its T tokens are not padding."""
        found = np.empty(rows.shape, np.int64)
        for part, mine, local in self._shared_out(rows):
            found[mine] = part.inputs_in(local)
        return found

    def read(self, wanted: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Read ``wanted`` rows; the same tensors as the parts' `read` returns."""
        found: list[Tensor] = []
        for part, mine, local in self._shared_out(wanted):
            rows = part.read(local)
            found = found or [torch.empty((wanted.size, each.shape[1]), dtype=each.dtype) for each in rows]
            for whole, each in zip(found, rows, strict=True):
                whole[torch.from_numpy(mine)] = each
        return tuple(found)

    def _shared_out(self, rows: NDArray[np.int64]) -> list[tuple[Rows, NDArray[np.bool_], NDArray[np.int64]]]:
        """Return for each part that has some of ``rows``: a mask of those rows, and their numbers within the part."""
        part_of = np.searchsorted(self.firsts, rows, side="right") - 1
        return [(self.parts[at], part_of == at, rows[part_of == at] - self.firsts[at]) for at in np.unique(part_of)]


class Mixture:
    """Maps each training position to a row of `JoinedRows`.

    Args:
        rows: the rows of all sources.
        weights: one weight per source, finite, 0 or more, not all 0.
        seed: the run's seed.
    """

    def __init__(self, rows: JoinedRows, weights: Sequence[float], seed: int) -> None:
        assert len(weights) == len(rows.parts)
        assert min(weights) >= 0 < sum(weights)
        self.rows, self.seed = rows, seed
        self.shares = np.asarray(weights, np.float64) / sum(weights)
        self._bounds = np.cumsum(self.shares)[:-1]
        self._before = np.zeros((1, len(weights)), np.int64)  # [num_blocks, num_sources]: rows before each block
        self._last: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the `JoinedRows` row, [n], at each of ``positions``, [n]."""
        found = np.empty(positions.shape, np.int64)
        for block in np.unique(positions // _BLOCK).tolist():
            here = positions // _BLOCK == block
            within = positions[here] - block * _BLOCK
            source_of, before = self._sources_of(block), self._counted(block)
            rows = np.empty(within.shape, np.int64)
            for source, size in enumerate(self.rows.sizes):
                mine = source_of[within] == source
                nth = before[source] + np.cumsum(source_of == source)[within[mine]] - 1
                rows[mine] = self.rows.firsts[source] + order.rows(self.seed + source, nth, size)
            found[here] = rows
        return found

    def counts(self, num_positions: int) -> NDArray[np.int64]:
        """Return how many of the first ``num_positions`` rows come from each source, [num_sources]."""
        block, rest = divmod(num_positions, _BLOCK)
        return self._counted(block) + np.bincount(self._sources_of(block)[:rest], minlength=len(self.shares))

    def tokens(self, num_positions: int) -> list[int]:
        """Return the number of tokens of each source, without padding, in the first ``num_positions`` rows."""
        found = []
        for source, (count, part) in enumerate(zip(self.counts(num_positions).tolist(), self.rows.parts, strict=True)):
            if isinstance(part, TextRows):
                found.append(count * part.seq_len)
                continue
            epochs, rest = divmod(count, part.num_rows)
            last = order.rows(self.seed + source, np.arange(count - rest, count), part.num_rows)
            whole = int(part.inputs_in(np.arange(part.num_rows)).sum()) if epochs else 0
            found.append(epochs * whole + int(part.inputs_in(last).sum()))
        return found

    def foreseen(self, num_positions: int) -> tuple[list[int], list[int]]:
        """Return rows and tokens of each source in the first ``num_positions`` rows; an estimate for very long runs."""
        if num_positions <= _COUNTED:
            return self.counts(num_positions).tolist(), self.tokens(num_positions)
        times = num_positions / _COUNTED
        counts, tokens = self.counts(_COUNTED).tolist(), self.tokens(_COUNTED)
        return [round(times * each) for each in counts], [round(times * each) for each in tokens]

    def evenly(self, num_rows: int) -> NDArray[np.int64]:
        """Return about ``num_rows`` evaluation rows, divided among sources by weight and spread evenly over each.

        Each source contributes at least one row, and at most all of its rows.
        """
        wanted = self.shares * num_rows
        counts = np.floor(wanted).astype(np.int64)
        largest_first = np.argsort(counts - wanted, kind="stable")
        counts[largest_first[: num_rows - floor(counts.sum())]] += 1
        sizes = np.asarray(self.rows.sizes)
        return np.concatenate(
            [
                first + np.arange(count) * size // count
                for first, size, count in zip(self.rows.firsts, sizes, np.clip(counts, 1, sizes), strict=False)
            ]
        )

    def _sources_of(self, block: int) -> NDArray[np.int64]:
        if self._last[0] != block:
            numbers = order.uniform(self.seed, np.arange(block * _BLOCK, (block + 1) * _BLOCK))
            self._last = (block, np.searchsorted(self._bounds, numbers, side="right"))
        return self._last[1]

    def _counted(self, block: int) -> NDArray[np.int64]:
        """Return the number of rows of each source before ``block``."""
        while len(self._before) <= block:
            first = len(self._before) - 1
            num_blocks = min(_AT_ONCE, block - first)
            numbers = order.uniform(self.seed, np.arange(first * _BLOCK, (first + num_blocks) * _BLOCK))
            source_of = np.searchsorted(self._bounds, numbers, side="right").reshape(num_blocks, _BLOCK)
            counts = np.stack([(source_of == source).sum(1) for source in range(len(self.shares))], axis=1)
            self._before = np.concatenate((self._before, self._before[-1] + np.cumsum(counts, axis=0)))
        return self._before[block]
