"""`ShardedGrad`: ``param.grad`` under an engine, the gradient averaged over ranks, in the parameter's shape, sharded.

Reading gathers it, writing changes this rank's own part, and the optimizer's pieces share the memory of that part. So
whatever a training loop does with gradients (`torch.nn.utils.clip_grad_norm_`, `clip_grad_value_`, `GradScaler`, norms
for a log, ``p.grad.mul_()``) gives the same numbers on every rank as in one process. By kind of operation:

    norm                         one all-gather for a list of gradients: each rank sends one number for each of them
    element-wise and in place    no communication: each rank computes its own part
    any other                    the gradient is gathered; if it was written to, each rank copies its own part back

It is the small case of a `DTensor` that an engine needs, and as there operations may be collective: every rank must
do the same ones in the same order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from zeroshard.comm import CONTROL, labelled
from zeroshard.host.torch_internals import UNWATCHED, in_backward, tree_leaves, tree_map, wrapper_without_memory
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.gradients import norm_of, norm_of_partials

aten = torch.ops.aten
View = Callable[[Tensor], Tensor]

# In-place and element-wise: on a shard they compute the same values as on the unsharded tensor.
_ELEMENT_WISE = frozenset(
    {"abs_", "add_", "addcdiv_", "addcmul_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "copy_", "div_", "exp_"}
    | {"fill_", "floor_", "lerp_", "log_", "masked_fill_", "mul_", "nan_to_num_", "neg_", "pow_", "reciprocal_"}
    | {"round_", "rsqrt_", "sign_", "sqrt_", "square_", "sub_", "tanh_", "trunc_"}
)


class GradTaker(Protocol):
    """The engine that a gradient is of."""

    def require_shown(self, what: str) -> None:
        """Raise RuntimeError if gradients are not reduced yet, or lack an autograd graph that they would need."""

    def require_same_grads(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """Raise ValueError if ranks have assigned different gradients, ``(name, tensor)`` each. Collective."""

    def drop_grads(self, params: set[nn.Parameter] | None) -> None:
        """Drop the gradients of these parameters."""


class GradHome:
    """Where the gradient of one parameter is stored, until gradients are cleared.

    The reference to the group is weak, because the garbage collector cannot follow a parameter's gradient.

    Attributes:
        comm, device: the ranks that hold its parts; its device.
        away: whether the reduced gradient is on the host, and `device` is another.
        sharded: whether each rank holds one part of the gradient; if False, each rank holds all of it.
        shape: the parameter's shape.
        gone: whether the gradient was cleared.
    """

    def __init__(self, taker: weakref.ref[GradTaker], group: FlatGroup, slot: int, name: str) -> None:
        self.taker, self.group, self.slot, self.name = taker, weakref.ref(group), slot, name
        grads, layout = group.grads, group.params.layout
        self.comm, self.device = grads.comm, grads.device
        self.away = bool(group.place) and self.device.type != "cpu"
        self.sharded = grads.shard_optim and grads.comm.world_size > 1
        self._slot = layout.slots[slot]
        self.shape = self._slot.shape
        self.layout = layout
        self.gone = False

    @cached_property
    def intervals(self) -> list[tuple[int, int]]:
        """``[start, stop)`` of the part that each rank holds, in the flattened gradient; computed at first use."""
        return [self._slot.within(*self.layout.interval(rank)) for rank in range(self.layout.world_size)]

    def cuts(self, rank: int) -> list[tuple[int, int]]:
        """``[start, stop)`` of each stretch of the rank's part that has a partial norm of its own (see `norms`)."""
        return [self._slot.within(*part) for part in self.layout.parts_of(rank)]

    def local(self) -> Tensor:
        """1-D: the part that this rank holds; raises RuntimeError if the gradient cannot be read now."""
        taker, group = self.taker(), self.group()
        what = f"{self.name}.grad"
        if taker is None or group is None:
            raise RuntimeError(f"{what}: its engine is gone; take a copy with full_tensor() before")
        taker.require_shown(what)
        if self.gone or not group.grads.used[self.slot] or group.grads.reduced is None:
            raise RuntimeError(f"{what}: gradients were cleared; take a copy with full_tensor() before")
        return group.grads.of_slot(self.slot)

    def note_write(self) -> None:
        """Note that the user changes the gradient in place, if each rank has all of it and so must do the same."""
        group = self.group()
        if group is not None and not self.sharded:
            group.grads.has_writes = True

    def zero(self) -> None:
        """Set the gradient to zero, whether it is reduced already or not."""
        group = self.group()
        if group is not None and not self.gone:
            group.grads.zero({self.slot})


class ShardedGrad(Tensor):
    """A gradient of which each rank holds a part; see the module's docstring.

    It is valid until gradients are cleared; to keep it longer, take a copy (`full_tensor`). It has no autograd graph.
    """

    _home: GradHome
    _views: tuple[View, ...]
    _arrived: Tensor | None
    __torch_function__ = UNWATCHED  # ty: ignore[incompatible-method-override]
    # Assigning to `data` writes the gradient; torch's own `data` would be this tensor's memory, which it does not have.
    data: Any = property(Tensor.detach, lambda self, new: self.copy_(new.detach().view(self.shape)))

    @staticmethod
    def __new__(
        cls: type[ShardedGrad], home: GradHome, like: Tensor, dtype: torch.dtype, views: tuple[View, ...] = ()
    ) -> ShardedGrad:
        """Make one with the shape and strides of ``like``; ``views`` map the gradient to the view of it shown here."""
        made = wrapper_without_memory(cls, like, dtype, home.device)
        made._home, made._views, made._arrived = home, views, None
        return made

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override] -- torch's own has other names
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation that a gradient takes part in, by its kind as in the module's docstring."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        adds = func in (aten.add_.Tensor, aten.add.Tensor) and isinstance(first, cls) and isinstance(args[1], Tensor)
        # In a backward autograd alone may add to an existing gradient.
        if adds and in_backward():
            return first._arrives(func, args[1])
        special = _SPECIAL.get(func.overloadpacket)
        if special is not None:
            found = special(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if func.namespace == "c10d":
            _require_read_only(func, args, kwargs)
        written = _written(func, args, kwargs)
        if written:
            return _write(func, args, kwargs, written)
        if getattr(func, "is_view", False) and isinstance(first, cls):
            return first._view(func, args[1:], kwargs)
        full_grads = _FullGrads()
        return func(*tree_map(full_grads, args), **tree_map(full_grads, kwargs))

    def full_tensor(self) -> Tensor:
        """The unsharded gradient as a plain tensor, a copy, in this gradient's dtype. Collective if it is sharded.

        Raises:
            RuntimeError: the gradient was cleared, or is not reduced yet.
        """
        return _through(self._views, gather_full(self._home))

    def to_local(self) -> Tensor:
        """1-D: the part that this rank holds, a view of the engine's own memory; raises as `full_tensor` does."""
        return self._home.local()

    def is_all_of(self, home: GradHome) -> bool:
        """Whether this is the gradient of ``home`` itself, not a view of it."""
        return self._home is home and not self._views

    def numpy(self, *, force: bool = False) -> Any:
        """`Tensor.numpy` of the unsharded gradient. Collective."""
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        """`Tensor.tolist` of the unsharded gradient. Collective."""
        return self.full_tensor().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.full_tensor().__array__(*([] if dtype is None else [dtype]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full_tensor()

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.full_tensor().__reduce_ex__(proto)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedGrad(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # -- for the engine ---------------------------------------------------------------------------------------

    def take_arrived(self) -> Tensor | None:
        """Remove and return the gradient that autograd has added since the last call: this rank's own, unreduced."""
        arrived, self._arrived = self._arrived, None
        return arrived

    def _arrives(self, func: Any, grad: Tensor) -> Tensor:
        if func is aten.add.Tensor:  # under create_graph autograd assigns the sum to `grad`
            return grad.detach()
        self._arrived = grad  # itself: a detached one would not share its version, by which a change in place shows
        return self

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        if func in (aten.detach.default, aten.alias.default):
            return self._seen_as(meta)
        found = func(meta, *args, **kwargs)
        if isinstance(found, Tensor):
            return self._seen_as(found, lambda full: func(full, *args, **kwargs))
        return [self._seen_as(part, lambda full, i=i: func(full, *args, **kwargs)[i]) for i, part in enumerate(found)]

    def _seen_as(self, like: Tensor, *further: View) -> ShardedGrad:
        return ShardedGrad(self._home, like, self.dtype, (*self._views, *further))


def _through(views: Iterable[View], full: Tensor) -> Tensor:
    for view in views:
        full = view(full)
    return full


def gather_full(home: GradHome) -> Tensor:
    """Return the unsharded gradient in the parameter's shape, as a new tensor. Collective if it is sharded."""
    local = home.local()
    if not home.sharded:
        return local.to(home.device, copy=True).view(home.shape)
    full = torch.empty(math.prod(home.shape), dtype=local.dtype, device=home.device)
    for rank, (start, stop) in enumerate(home.intervals):
        if start < stop:
            if rank == home.comm.rank:
                full[start:stop].copy_(local)
            with labelled("grads/read"):
                home.comm.broadcast(full[start:stop], src=rank).wait()
    return full.view(home.shape)


# -- writing --------------------------------------------------------------------------------------------------------


class _FullGrads:
    """Replaces each `ShardedGrad` among a function's arguments by the unsharded tensor; gathers each gradient once."""

    def __init__(self) -> None:
        self._gathered: dict[int, Tensor] = {}

    def gradient(self, home: GradHome) -> Tensor:
        """The unsharded gradient, in the parameter's shape."""
        if id(home) not in self._gathered:
            self._gathered[id(home)] = gather_full(home)
        return self._gathered[id(home)]

    def __call__(self, value: Any) -> Any:
        return _through(value._views, self.gradient(value._home)) if isinstance(value, ShardedGrad) else value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedGrad]:
    """The gradients that ``func`` changes in place."""
    if not func._schema.is_mutable:
        return []
    found: list[ShardedGrad] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, list | tuple) else [value]
            found += [each for each in values if isinstance(each, ShardedGrad)]
    return found


def _require_read_only(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError for a gradient into which a collective of torch.distributed would write.

    Their schemas do not say what they write: it is all but what is called an input, and what is sent.
    """
    for index, argument in enumerate(func._schema.arguments):
        if argument.name.startswith("input") or func.overloadpacket is torch.ops.c10d.send:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if any(isinstance(leaf, ShardedGrad) for leaf in tree_leaves(value)):
            raise RuntimeError(
                "param.grad: a collective of torch.distributed would write into it, and it is averaged over the ranks "
                "already; leave the collective out, or give it param.grad.full_tensor()"
            )


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[ShardedGrad]) -> Any:
    for grad in written:
        grad._home.note_write()
    name = func.overloadpacket.__name__
    listed = name.startswith("_foreach_")
    if not any(grad._views for grad in written) and name.removeprefix("_foreach_") in _ELEMENT_WISE:
        if listed and len(written) == len(args[0]):
            cut = [
                [_part(each, grad._home) for each, grad in zip(value, written, strict=True)]
                if isinstance(value, list | tuple)
                else value
                for value in args
            ]
            if not any(grad._home.away for grad in written):
                func(*cut, **kwargs)
                return None
            for index, grad in enumerate(written):  # they may be on several devices
                func(*[[v[index]] if isinstance(v, list) else _beside(v, grad._home) for v in cut], **kwargs)
            return None
        if not listed and len(written) == 1 and args[0] is written[0]:
            home = written[0]._home
            func(*[_part(value, home) for value in args], **{key: _part(value, home) for key, value in kwargs.items()})
            return args[0]
    full_grads = _FullGrads()
    result = func(*tree_map(full_grads, args), **tree_map(full_grads, kwargs))
    for home in {id(grad._home): grad._home for grad in written}.values():
        start, stop = own_slice(home)
        home.local().copy_(full_grads.gradient(home).reshape(-1)[start:stop])
    return None if result is None else (written[0] if isinstance(result, Tensor) else list(written))


def own_slice(home: GradHome) -> tuple[int, int]:
    """``[start, stop)`` of the part of the flattened gradient that `GradHome.local` returns on this rank."""
    return home.intervals[home.comm.rank] if home.sharded else (0, math.prod(home.shape))


def _part(value: Any, home: GradHome) -> Any:
    """Return the elements of an operand that belong to this rank's part of the gradient at ``home``."""
    if isinstance(value, ShardedGrad):
        if value._home is home and not value._views:
            return home.local()
        value = value.full_tensor()
    if not isinstance(value, Tensor) or value.dim() == 0:
        return _beside(value, home)
    start, stop = own_slice(home)
    return _beside(value.expand(home.shape).reshape(-1)[start:stop], home)


def _beside(value: Any, home: GradHome) -> Any:
    """Return a tensor on the device where this rank's part of the gradient at ``home`` is; other values as they are."""
    return value.to("cpu") if home.away and isinstance(value, Tensor) else value


# -- numbers over all ranks -----------------------------------------------------------------------------------------


def norms(homes: Sequence[GradHome], order: float) -> Tensor:
    """``[len(homes)]``, float64: the p-norm of each gradient, the same bits on every rank and at every stage.

    Collective if they are sharded: one all-gather for all of them.
    """
    locals_ = [home.local() for home in homes]
    comm, sharded = homes[0].comm, homes[0].sharded
    zero = torch.zeros((), dtype=torch.float64, device=homes[0].device)
    parts = []
    for rank in [comm.rank] if sharded else range(comm.world_size):
        for cuts in zip(*[home.cuts(rank) for home in homes], strict=True):
            for home, local, (start, stop) in zip(homes, locals_, cuts, strict=True):
                before = own_slice(home)[0]
                part = local[start - before : stop - before]
                norm = norm_of(part.to(home.device), order).to(torch.float64) if stop > start else zero
                parts.append(norm if math.isinf(order) else norm**order)
    return norm_of_partials(torch.stack(parts).view(-1, len(homes)), comm if sharded else None, order)


def _norm_dtype(grad: ShardedGrad, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or torch.empty((), dtype=grad.dtype, device="meta").abs().dtype


def _order(value: Any) -> float | None:
    """Return p of the p-norm if partial norms can be combined for it (p > 0), else None."""
    order = 2.0 if value is None else float(value)
    return order if order > 0 else None


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0]
    order = _order(args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p")))
    along = args[2] if len(args) > 2 else kwargs.get("dim")
    keeps = kwargs.get("keepdim") or (len(args) > 3 and args[3])
    if order is None or not isinstance(grad, ShardedGrad) or grad._views or along or keeps:
        return NotImplemented
    return norms([grad._home], order)[0].to(_norm_dtype(grad, kwargs.get("dtype")))


def _norms_of_all(homes: Sequence[GradHome], order: float) -> list[Tensor]:
    """`norms` of gradients that may be of several engines: one call for those with the same ranks and sharding."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for place, home in enumerate(homes):
        alike.setdefault((id(home.comm), home.sharded), []).append(place)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        found |= zip(places, norms([homes[place] for place in places], order).unbind(), strict=True)
    return [found[place] for place in range(len(homes))]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grads = args[0]
    order = _order(args[1] if len(args) > 1 else kwargs.get("ord"))
    if order is None or not all(isinstance(grad, ShardedGrad) and not grad._views for grad in grads):
        return NotImplemented
    found = _norms_of_all([grad._home for grad in grads], order)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [norm.to(_norm_dtype(grad, dtype)) for grad, norm in zip(grads, found, strict=True)]


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unscale for `torch.amp.GradScaler`; ranks agree on whether any rank's part has NaN/Inf. Collective."""
    grads, found_inf, inverse_scale = args
    if not all(isinstance(grad, ShardedGrad) and not grad._views for grad in grads):
        raise RuntimeError("GradScaler.unscale_: some gradients are sharded and some are not; give each an optimizer")
    home = grads[0]._home
    away = [grad._home.local() for grad in grads if grad._home.away]
    if away:
        found = found_inf.to("cpu")
        func(away, found, inverse_scale.to("cpu"))
        found_inf.copy_(found)
    if len(away) < len(grads):
        func([grad._home.local() for grad in grads if not grad._home.away], found_inf, inverse_scale)
    if home.sharded:
        found = found_inf.reshape(1)  # stays on the gradients' device: moving it to the host would block the host
        with labelled(CONTROL):
            home.comm.all_reduce(found, "max").wait()
        found_inf.copy_(found.view(found_inf.shape))
    return None


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grads = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    if not all(isinstance(grad, ShardedGrad) and not grad._views for grad in grads):
        return NotImplemented
    for grad in cast("Sequence[ShardedGrad]", grads):
        grad._home.zero()
    return None if args[0] is grads else args[0]


_SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.linalg_vector_norm: _vector_norm,
    aten.norm: _vector_norm,
    aten._foreach_norm: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    aten.zero_: _zero,
    aten._foreach_zero_: _zero,
}
