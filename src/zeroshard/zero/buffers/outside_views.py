"""Tensors of the user's in the memory of full weights, which he was shown and which are to be freed.

He may hold a view, a detached tensor, a graph over either. Were the storage shrunk to nothing, these would point at
nothing, and a read would end the process. So where more tensors lie in it at the end than when it was shown, it is left
to them, and the weights get another. They show the values that they were taken of until the weights change, as in one
process, and NaN from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class OutsideViews:
    """Of one buffer of full weights."""

    def __init__(self) -> None:
        self._before: int | None = None  # tensors in its memory when it was shown; None: it is not shown
        self._left: list[StorageWeakRef] = []  # memory that shows the weights as they still are

    def may_come(self, full: Tensor) -> None:
        """The user is shown this buffer from here on."""
        self._before = _num_tensors(full)

    def hold(self, full: Tensor) -> bool:
        """Whether the memory of ``full``, which is no longer shown, must be left to the user's tensors."""
        before, self._before = self._before, None
        held = before is not None and _num_tensors(full) > before
        if held:
            self._left.append(StorageWeakRef(full.untyped_storage()))
        return held

    def outdate(self, value: Tensor) -> None:
        """Fill with ``value``, 0-dim, what was left: the weights are others now."""
        left, self._left = self._left, []
        for reference in left:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                value.new_empty(0).set_(storage).fill_(value)


def _num_tensors(tensor: Tensor) -> int:
    """How many lie in the memory of this one, itself among them; those that graphs have saved too."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
