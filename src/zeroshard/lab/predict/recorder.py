"""Reports every allocation, every free and every operation in order; traces are recorded with it.

A storage counts as allocated from the first operation that returns a tensor on it, and as freed when its last reference
is gone. Memory that an operation allocates and frees inside itself is not seen. `zeroshard.train.profiling.memory`
measures
by the same rules, but shares no code with this module, because predictions are tested against it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OnChange = Callable[[int, int], None]  # called with a storage's number and its change in bytes
Ran = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class StorageEvents(TorchDispatchMode):
    """Reports each allocation and free of a storage in this block.

    Args:
        on_change: called with the storage's number and its bytes, which are negative if it is freed.
        ran: called after each operation, with the operator, its arguments and its result.
    """

    def __init__(self, on_change: OnChange, ran: Ran | None = None) -> None:
        super().__init__()
        self._on_change, self._ran = on_change, ran
        self._numbers: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Report neither the allocation nor the free of these tensors' storages: they existed before."""
        for tensor in tensors:
            self._know(tensor.untyped_storage(), silent=True)

    def number_of(self, tensor: Tensor) -> int:
        """The number of the tensor's storage; 0 if the storage is not known."""
        return self._numbers.get(tensor.untyped_storage()._cdata, (0,))[0]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler (1 s) only to disable it in `__torch_dispatch__`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._know(leaf.untyped_storage())
        if self._ran is not None:
            self._ran(func, args, kwargs, result)
        return result

    def _know(self, storage: torch.UntypedStorage, *, silent: bool = False) -> None:
        key = storage._cdata
        if key in self._numbers:
            return
        self._next += 1
        number, num_bytes = self._next, 0 if silent else storage.nbytes()

        def gone(_: Any) -> None:
            del self._numbers[key]
            if num_bytes:
                self._on_change(number, -num_bytes)

        self._numbers[key] = (number, weakref.ref(storage, gone))
        if num_bytes:
            self._on_change(number, num_bytes)
