"""Rows of a run's length, whatever they are cut from, by their numbers: what shuffled and mixed batches read.

Shapes: B rows, T = seq_len.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Rows(Protocol):
    """Rows with random access."""

    @property
    def num_rows(self) -> int:
        """Rows."""
        ...

    def targets_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each of ``rows`` how many of its targets count."""
        ...

    def inputs_in(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each of ``rows`` how many of its T tokens are no padding."""
        ...

    def read(self, wanted: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """``(tokens_BT, targets_BT)``, int64, and of packed rows ``positions_BT``."""
        ...
