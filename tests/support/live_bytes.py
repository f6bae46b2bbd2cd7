"""How many bytes an operation holds at once."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The most bytes of real storages that operations in this block have returned and that were alive at once.

    Their sizes are asked for anew after each operation, because the engine frees weights by shrinking their storages.
    ``apart``: tells of storages that do not count, as of what is in a file.
    """

    def __init__(self, apart=lambda storage: False):
        super().__init__()
        self.peak, self._storages, self._apart = 0, {}, apart

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if self._apart(storage):
                    continue
                self._storages[storage._cdata] = weakref.ref(storage)
        live = [storage for ref in self._storages.values() if (storage := ref()) is not None]
        self.peak = max(self.peak, sum({storage._cdata: storage.nbytes() for storage in live}.values()))
        return result
