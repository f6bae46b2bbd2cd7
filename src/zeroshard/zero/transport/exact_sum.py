"""`ExactGradientSum`: a sum that depends neither on the order of its terms nor on how they are shared out.

No sum is rounded until all terms are added up. The total is rounded once, to the gradient's dtype. Two float64 hold 106
bits. For fp32 numbers, which have 24, a bit is lost only if terms of one element differ by a factor of 2**80 and the
larger ones cancel.

Knuth 1969, The Art of Computer Programming 2, section 4.2.2, theorem B: the error of an addition is a number of the
same format; Dekker 1971, https://doi.org/10.1007/BF01397083. Demmel and Nguyen 2015, "Parallel Reproducible
Summation", https://doi.org/10.1109/TC.2014.2345391, explain why parallel sums need this.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_NUMEL = {"cpu": 1 << 15}
"""Elements that are added at a time, by type of device: on a CPU five operands in float64 fit into a core's cache."""
OTHER_CHUNK_NUMEL = 1 << 20  # so many that a GPU's launch overhead is negligible


class ExactGradientSum:
    """A sum of tensors ``[n]`` that is rounded when it is read.

    Args:
        numel, dtype, device: n, and the dtype and device of the terms.
        chunk_numel: elements that are added at a time; each call allocates three times as many in float64.

    Attributes:
        high, low: ``[n]``, float64 (for complex numbers ``[2 n]``): the sum, and the compensation: the sum of the
            rounding errors.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, chunk_numel: int) -> None:
        numel *= 1 + dtype.is_complex
        self.high = torch.empty(numel, dtype=torch.float64, device=device)
        self.low = torch.zeros(numel, dtype=torch.float64, device=device)
        self._chunk_numel, self._is_empty = max(1, min(chunk_numel, numel)), True

    def follow(self, values: Tensor) -> None:
        """Replace the sum by ``values [n]`` in elements that are not the rounded sum: a user has written to them."""
        values, was_empty, self._is_empty = _real(values), self._is_empty, False
        if was_empty:
            self.high.copy_(values)
            return
        (total,), rounded = self.high.new_empty(1, self._chunk_numel), values.new_empty(self._chunk_numel)
        for chunk in [] if values.is_meta else self._chunks():
            (s,), (ours,), there = self._cut(chunk, total), self._cut(chunk, rounded), values[chunk]
            self._round(chunk, s, ours)
            if not (there.device.type == "cpu" and torch.equal(ours, there)):  # the host would wait for a GPU
                high, low, same = self.high[chunk], self.low[chunk], ours == there
                high.copy_(torch.where(same, high, there.to(high.dtype)))
                low.copy_(torch.where(same, low, torch.zeros_like(low)))

    def add_rows(self, rows: Tensor) -> None:
        """Add each of ``rows [k, n]``."""
        rows = _real(rows)
        term, total, part = self.high.new_empty(3, self._chunk_numel)
        first = int(self._is_empty)
        if self._is_empty:
            self.high.copy_(rows[0])
            self._is_empty = False
        for chunk in self._chunks():
            high, low, (b, s, x) = self.high[chunk], self.low[chunk], self._cut(chunk, term, total, part)
            for row in rows[first:, chunk]:
                b.copy_(row)
                torch.add(high, b, out=s)
                torch.sub(s, high, out=x)  # the part of the term that is in the sum
                b.sub_(x)
                torch.sub(s, x, out=x)
                torch.sub(high, x, out=x)
                low.add_(x.add_(b))
                high.copy_(s)

    def write(self, target: Tensor) -> None:
        """Write the sum, rounded, to ``target [n]``; NaN and Inf are those that plain addition gives."""
        target = _real(target)
        (total,) = self.high.new_empty(1, self._chunk_numel)
        for chunk in self._chunks():
            (s,) = self._cut(chunk, total)
            self._round(chunk, s, target[chunk])

    def _round(self, chunk: slice, scratch: Tensor, target: Tensor) -> None:
        torch.nan_to_num(self.low[chunk], nan=0.0, out=scratch)
        target.copy_(scratch.add_(self.high[chunk]))

    def _cut(self, chunk: slice, *scratch: Tensor) -> tuple[Tensor, ...]:
        """Return the first elements of each scratch tensor, as many as the chunk has."""
        return tuple(tensor[: chunk.stop - chunk.start] for tensor in scratch)

    def _chunks(self) -> list[slice]:
        """Return the chunks of the sum; on the meta device, where nothing is computed, only the first."""
        numel, step = self.high.numel(), self._chunk_numel
        stops = [numel] if not self.high.is_meta else [min(step, numel)]
        return [slice(start, min(start + step, stops[0])) for start in range(0, stops[0], step)]


def _real(tensor: Tensor) -> Tensor:
    """View complex numbers as twice as many real ones."""
    return torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor
