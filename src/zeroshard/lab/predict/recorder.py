"""Reports every allocation, every free and every operation in order; traces are recorded with it.

A storage counts as allocated from the first operation that returns a tensor on it, and as freed when its last reference
is gone. Memory that an operation allocates and frees inside itself is not seen. `zeroshard.train.profiling.memory`
measures by the same rules, but shares no code with this module, because predictions are tested against it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOST_KNOWN = 20_000  # results that are remembered at once
OnChange = Callable[[int, int], None]  # called with a storage's number and its change in bytes


@dataclass(slots=True)
class Alike:
    """Calls of an operator on tensors of the same shapes, strides and dtypes: what they return, and what each costs."""

    several: bool  # whether it is a tuple of tensors
    facts: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]  # of each tensor, which is a new one
    work: Any = ...  # a `zeroshard.lab.predict.work.Work` or None; ``...``: nobody has asked


Ran = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, Alike | None], None]


class StorageEvents(TorchDispatchMode):
    """Reports each allocation and free of a storage in this block.

    Args:
        on_change: called with the storage's number and its bytes, which are negative if it is freed.
        ran: called after each operation, with the operator, its arguments, its result and the calls that are alike, if
            they are remembered.
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
        result, alike = _result(func, args, kwargs)
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._know(leaf.untyped_storage())
        if self._ran is not None:
            self._ran(func, args, kwargs, result, alike)
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


class _Unknown(Exception):
    """What an operation returns cannot be told from a key."""


_known: dict[Any, Alike] = {}


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Alike | None]:
    """``func(*args, **kwargs)``; on the meta device new tensors like those that the same call has returned before.

    torch computes shapes there in Python, and the blocks of a model, and its traces, have the same ones.
    """
    try:
        key = (func, _key(args), _key(tuple(kwargs.items()))) if _makes_tensors(func) else None
    except _Unknown:
        key = None
    if key is None:
        return func(*args, **kwargs), None
    if (alike := _known.get(key)) is not None:
        made = tuple(_new(*each) for each in alike.facts)
        return made if alike.several else made[0], alike
    result = func(*args, **kwargs)
    tensors = result if isinstance(result, tuple) else (result,)
    if not _are_new(tensors, (*args, *kwargs.values())):
        return result, None
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    facts = [(each.shape, each.stride(), each.dtype) for each in tensors]
    alike = _known[key] = Alike(isinstance(result, tuple), facts)
    return result, alike


def _new(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ops.aten.empty_strided.default(size, stride, dtype=dtype, device=torch.device("meta"))


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether the operation is one of torch's that changes nothing and, by its schema, returns no view."""
    schema = func._schema
    shares = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and not schema.is_mutable and not shares


def _key(value: Any) -> Any:
    """What a result on the meta device and its cost depend on; 1, 1.0 and True are different."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_meta or value.is_complex():
            raise _Unknown
        # a tensor that is expanded has fewer bytes than its shape says
        num_bytes = None if value.is_contiguous() else value.untyped_storage().nbytes()
        return value.shape, value.stride(), value.dtype, num_bytes
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if value is None or isinstance(value, int | float | str | torch.dtype | torch.device | torch.memory_format):
        return type(value), value
    raise _Unknown


def _are_new(tensors: Sequence[Any], given: Iterable[Any]) -> bool:
    """Whether each of these is a tensor on the meta device with storage of its own, of the size that it needs."""
    storages = {each.untyped_storage()._cdata for each in tree_leaves(given) if isinstance(each, Tensor)}
    for each in tensors:
        if not isinstance(each, Tensor) or not each.is_meta or each.layout != torch.strided:
            return False
        like = _new(each.shape, each.stride(), each.dtype)
        if each.storage_offset() or like.untyped_storage().nbytes() != each.untyped_storage().nbytes():
            return False
    own = {each.untyped_storage()._cdata for each in tensors}
    return len(own) == len(tensors) and own.isdisjoint(storages)
