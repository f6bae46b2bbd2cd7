"""Tensors of the user that share memory with unsharded weights, which `Zero.full_params` exposed and which are freed.

The user may keep a view, a detached tensor, or a graph over either. If the storage were resized to nothing, a read of
such a tensor would crash the process. So if more tensors share the storage when it is to be freed than when it was
exposed, the storage is left to them, and the weights get a new one. The user's tensors keep their values until the
weights change, as in one process, and are filled with NaN then.

Values that the user has written into exposed weights are compared with those before, to warn if they will be dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard.zero.buffers.written_weights import bit_sums


class OutsideViews:
    """The user's tensors in one buffer of unsharded weights."""

    def __init__(self) -> None:
        self._before: int | None = None  # tensors in its memory when it was exposed to the user; None: it is not
        self._bits: Tensor | None = None  # sums over the buffer's bits, since it was exposed or written back
        self._left: list[StorageWeakRef] = []  # storages left to the user's tensors, with values that are still current

    def expose(self, full: Tensor) -> None:
        """Record that this buffer is exposed to the user from here on."""
        self._before, self._bits = _num_tensors(full), bit_sums(full)

    def accept(self, full: Tensor) -> None:
        """Count writes from here on, because those before were taken over."""
        self._bits = None if self._bits is None else bit_sums(full)

    def written(self, full: Tensor) -> bool:
        """Whether the exposed buffer has other values than before; it is not exposed any more."""
        bits, self._bits = self._bits, None
        return bits is not None and not torch.equal(bits, bit_sums(full))

    def hold(self, full: Tensor) -> bool:
        """Return whether the memory of ``full``, exposed until now, must be left to the user's tensors."""
        before, self._before = self._before, None
        held = before is not None and _num_tensors(full) > before
        if held:
            self._left.append(StorageWeakRef(full.untyped_storage()))
        return held

    def outdate(self, value: Tensor) -> None:
        """Fill the storages that were left to the user with ``value``, 0-dim, because the weights have changed."""
        left, self._left = self._left, []
        for reference in left:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                value.new_empty(0).set_(storage).fill_(value)


def _num_tensors(tensor: Tensor) -> int:
    """Return how many tensors share this one's storage: itself, and those that graphs have saved, included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
