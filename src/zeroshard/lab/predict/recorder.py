"""Every allocation that operations make, every end of one, and every operation, in order: what a trace is made of.

A storage begins with the first operation that returns a tensor on it, and ends when its last reference goes. What an
operation takes and gives back within itself is not seen. `zeroshard.profiling.memory` measures by the same rules, and
shares no code with this: predictions are held against it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Heard = Callable[[int, int], None]  # which storage, and its change in bytes
Ran = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class StorageEvents(TorchDispatchMode):
    """Tells of each change of live bytes in this block.

    Args:
        heard: called with a number for each storage and the bytes by which it grew, or shrank where negative.
        ran: called after each operation, with the operator, its arguments and its result.
    """

    def __init__(self, heard: Heard, ran: Ran | None = None) -> None:
        super().__init__()
        self._heard, self._ran = heard, ran
        self._numbers: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """These were there before; their ends are not told either."""
        for tensor in tensors:
            self._know(tensor.untyped_storage(), silent=True)

    def number_of(self, tensor: Tensor) -> int:
        """Of the tensor's storage; 0 where none was told of it."""
        return self._numbers.get(tensor.untyped_storage()._cdata, (0,))[0]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, in a second, to keep it away from each call of the method below."""
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
                self._heard(number, -num_bytes)

        self._numbers[key] = (number, weakref.ref(storage, gone))
        if num_bytes:
            self._heard(number, num_bytes)
