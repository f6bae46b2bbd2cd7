"""Detect reads of parameters that are outdated, because they are older than the last optimizer step or sharded.

[Note: Read between steps]
    From an optimizer step until the next forward has waited for its gather, a parameter that is refreshed lazily holds
    old values, or NaN. During that time its class is a subclass of its original class, with a ``__torch_function__``
    that detects every operation that reads values: the engine then gathers the weights, as the next forward would have
    done, and restores the original class. Sharded parameters are watched in the same way. A read of them in a forward
    or backward, outside of the call of their unit, gathers them, as the call of a part of the unit does; elsewhere it
    warns and finds NaN, and a write raises, also through ``.data`` or a view, because it would be lost. Operations that
    read no values (shape, dtype, ``grad``, flags, hooks) pass through. A view or a ``.data`` that was taken before the
    step is another tensor, and reads of it are not detected.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.host.torch_internals import (
    UNWATCHED,
    as_plain,
    before_collectives,
    compiler_looks,
    is_functorch_wrapped_tensor,
    storage_id,
    tree_leaves,
)
from zeroshard.zero.buffers.flat_params import FlatParams, Reads
from zeroshard.zero.core.hooks import NO_COPY
from zeroshard.zero.core.weights import SHARDED
from zeroshard.zero.guards.collective_order import CollectiveOrder
from zeroshard.zero.runtime.runtime import Runtime


class WatchedReads(Reads):
    """Watches reads of the weights of one engine: [Note: Read between steps]."""

    def __init__(self, runtime: Runtime, order: CollectiveOrder) -> None:
        before_collectives(_given_to_collective)
        self._runtime, self._order = weakref.ref(runtime), order
        self._watches: weakref.WeakKeyDictionary[FlatParams, dict[bool, Watch]] = weakref.WeakKeyDictionary()
        self._warned = False

    def watch(self, weights: FlatParams) -> None:
        """Before a read of these parameters bring all weights up to date."""
        sharded, watches = weights.state is SHARDED, self._watches.setdefault(weights, {})
        if sharded not in watches:
            read = _reader(weakref.ref(self), weakref.ref(weights))
            watches[sharded] = Watch(read, weights.changes.name_of if sharded else None)
        watches[sharded].mark(weights.params)

    def unwatch(self, params: Iterable[nn.Parameter]) -> None:
        """Watch reads of these parameters no more."""
        unmark(params)

    def forward_ends(self) -> None:
        """Let autograd refuse a backward through views of weights from before the step, whose gather ends only now.

        Nobody has read the parameters themselves.
        """
        self._order.take_gathers()
        runtime = self._runtime()
        if runtime is None or not torch.is_grad_enabled():
            return
        for group in (group for unit in runtime.order for group in unit.groups):
            if group.params.state.in_flight and not group.params.shard_params:
                torch.autograd.graph.increment_version(group.params.params)

    def bring_up_to_date(self, params: FlatParams) -> None:
        """Gather stale weights, because some of these are about to be read.

        These are the gathers, in their order, with which the next forward begins: a rank that reads alone blocks until
        the other ranks begin that forward. At stage 3 these weights alone are gathered in a forward or backward, and
        elsewhere they stay sharded, and a warning says so once.
        """
        runtime = self._runtime()
        if runtime is None:
            return
        if not runtime.shard_params:
            runtime.weights.unshard_all()
        elif compiler_looks():  # dynamo reads no values
            runtime.weights.show_as_current()
        elif not runtime.read_in_pass(params) and not self._warned:
            self._warned = True
            warnings.warn(
                "model: weights are read outside of forward and backward, where they are sharded and show NaN; "
                "read them, and compute what depends on them (a penalty, say), inside zero.full_params()",
                stacklevel=4,
            )


def _reader(this: weakref.ref[WatchedReads], params: weakref.ref[FlatParams]) -> Callable[[], None]:
    def read() -> None:
        reads, read_ones = this(), params()
        if reads is not None and read_ones is not None:
            reads.bring_up_to_date(read_ones)

    return read


class Watch:
    """Calls ``read`` before the first read of parameters, while their class is one that it has made.

    Args:
        read: called before their values are read. If they are not sharded, it must call `unmark` in the end.
        sharded: if they are, returns their names for an error: they must not be written to.
    """

    def __init__(self, read: Callable[[], None], sharded: Callable[[Tensor], str] | None = None) -> None:
        self._members = {"_zeroshard_read": staticmethod(read), "_zeroshard_name": sharded and staticmethod(sharded)}
        self._kinds: dict[type, type] = {}

    def mark(self, params: Iterable[nn.Parameter]) -> None:
        """Begin to watch these parameters."""
        for param in params:
            kind = type(param)
            if issubclass(kind, _Outdated):
                kind = kind.__mro__[2]
            elif kind.__torch_function__ is not UNWATCHED:  # a user's class that intercepts reads itself
                continue
            if kind not in self._kinds:
                # a subclass with the same name, whose instances call back before they are read
                members = {"__module__": kind.__module__, **self._members}
                self._kinds[kind] = type(kind.__name__, (_Outdated, kind), members)
            # The class is exchanged at each step, as nothing else sees reads between steps and no others: a class
            # with `__torch_function__` for good would run Python at every operation of forward, a mode sees nothing
            # outside of its block, and an assignment to `param.data` leaves the parameter's class as it is.
            param.__class__ = self._kinds[kind]


def unmark(params: Iterable[Any]) -> None:
    """Restore these parameters' own classes: their values are current, or reads need not be watched any more."""
    for param in params:
        if isinstance(param, _Outdated):
            param.__class__ = type(param).__mro__[2]


class _Outdated:
    """Base class that calls back before a parameter's values are read."""

    _zeroshard_read: Callable[[], None]
    _zeroshard_name: Callable[[Tensor], str] | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NO_VALUES or (func in _SHAPED_AS_ANOTHER and not isinstance(args[0], _Outdated)):
            with as_plain():
                return func(*args, **kwargs)
        for leaf in _written(func, args, kwargs):
            name_of = type(leaf)._zeroshard_name if isinstance(leaf, _Outdated) else None
            if name_of is not None:
                raise _refused(name_of(leaf), assigned=func == _ASSIGNS)
        sharded = None
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, _Outdated):  # the callback of another one may have restored it
                type(leaf)._zeroshard_read()
            if isinstance(leaf, _Outdated):
                sharded = leaf
        return func(*args, **kwargs) if sharded is None else _read(func, args, kwargs, sharded)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if any(isinstance(made, nn.Module) for made in memo.values()):  # deepcopy notes a module before what is in it
            raise RuntimeError(NO_COPY)
        type(self)._zeroshard_read()
        unmark([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self)._zeroshard_read()
        unmark([self])
        return self.__reduce_ex__(protocol)


class _ShardedView(Tensor):
    """A view of sharded weights, or their ``.data``: one NaN that shows everywhere, and that nobody may write to."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, _ShardedView) for leaf in _written(func, args, kwargs)):
            raise _refused("weights", assigned=False)
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _ShardedView))
        return _read(func, args, kwargs, first)


def _read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sharded: Tensor) -> Any:
    """Call a function of a sharded tensor; a view that it returns is watched too."""
    with as_plain():
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.layout is torch.strided and not is_functorch_wrapped_tensor(result):
            shares = storage_id(result) == storage_id(sharded)
            return result.as_subclass(_ShardedView) if shares else result
        return result


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments into which a function writes."""
    name = getattr(func, "__name__", "")
    if func == _ASSIGNS or name in _IN_PLACE or (name.endswith("_") and not name.startswith("__")):
        return tree_leaves(args[0]) if args else tree_leaves(kwargs)
    return tree_leaves(kwargs["out"]) if "out" in kwargs else []


def _given_to_collective(tensor: Tensor) -> None:
    """Before a collective of torch.distributed, which takes memory as it lies: gloo would write beside the one NaN."""
    if isinstance(tensor, _Outdated):
        name_of = type(tensor)._zeroshard_name
        if name_of is None:
            type(tensor)._zeroshard_read()
            return
        name = name_of(tensor)
    elif isinstance(tensor, _ShardedView):
        name = "weights"
    else:
        return
    what = "a collective was given it while the weights were sharded, and one NaN stands for all of its elements"
    raise RuntimeError(f"{name}: {what}; call it inside zero.full_params(write_back=True), on every rank")


def _refused(name: str, *, assigned: bool) -> RuntimeError:
    what = "it was written to while the weights were sharded, and one NaN stood for more than one element of the "
    what = "its .data was assigned to while the weights were sharded" if assigned else f"{what}written-to tensor"
    return RuntimeError(f"{name}: {what}; do it inside zero.full_params(write_back=True), on every rank")


def _attribute(name: str) -> list[Any]:
    """Return the functions that ``__torch_function__`` is given for an attribute that is read, set or deleted."""
    member = getattr(Tensor, name)
    return [getattr(member, method) for method in ("__get__", "__set__", "__delete__") if hasattr(member, method)]


_ASSIGNS = Tensor.data.__set__  # ty: ignore[missing-attribute]
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())])
_ATTRIBUTES = """
    _backward_hooks _post_accumulate_grad_hooks _version device dtype grad grad_dtype grad_fn is_cpu is_cuda is_leaf
    is_meta is_nested is_quantized is_sparse itemsize layout nbytes ndim output_nr requires_grad retains_grad shape
"""
_METHODS = """
    dim element_size is_complex is_contiguous is_floating_point is_inference ndimension nelement new_empty new_full
    new_ones new_zeros numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size
    storage_offset stride __len__
"""
_NO_VALUES = frozenset(
    [
        *(function for name in _ATTRIBUTES.split() for function in _attribute(name)),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(torch.is_complex, torch.is_floating_point, torch.numel),
        *(torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randn_like, torch.zeros_like),
    ]
)
_SHAPED_AS_ANOTHER = frozenset([Tensor.view_as, Tensor.reshape_as, Tensor.expand_as, Tensor.type_as])
