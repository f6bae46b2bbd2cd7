"""A unit: parameters that are gathered, freed and reduced together, such as a block's; the root unit has all others.

A unit's parameters are grouped by dtype, device and whether they are trained, as a flat buffer has one of each. Nearly
every unit has one group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from torch import nn

from zeroshard.comm.streams import Streams
from zeroshard.host.torch_internals import has_forward_hooks, own_parameters
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.weights import SHARDED, Weights

_REQUIRES_GRAD = attrgetter("requires_grad")
Named = list[tuple[str, nn.Parameter]]  # parameters with their names in the model


class Group:
    """One flat buffer of weights, the buffer of their gradients, and the pieces of both that the optimizer sees.

    Attributes:
        shards: for each of ``params.pieces``, the `nn.Parameter` that the optimizer updates: a view of the master.
        unreduced: whether some rank may have gradients that wait for a reduction; the same on every rank.
    """

    def __init__(self, params: Weights, grads: Gradients) -> None:
        self.params, self.grads = params, grads
        floating = params.dtype.is_floating_point or params.dtype.is_complex
        self.shards = [nn.Parameter(params.piece_of_master(piece), requires_grad=floating) for piece in params.pieces]
        if grads.reduced_dtype != params.dtype:
            for shard in self.shards:
                shard.grad_dtype = None  # so that its gradient may have a narrower dtype
        self.unreduced = False
        self._cuts = grads.cuts(params.pieces)

    def use_streams(self, streams: Streams) -> None:
        """Gather and reduce on these streams from now on."""
        self.params.use_streams(streams)
        self.grads.use_streams(streams)

    @property
    def trained(self) -> bool:
        """Whether any parameter of the group takes gradients now."""
        return any(map(_REQUIRES_GRAD, self.params.params))

    def expose_grads(self) -> None:
        """Set ``grad`` of the optimizer's pieces to the reduced gradients; None if no rank had one."""
        if self.grads.away is not None:
            self.grads.away.land()
            if self.grads.away.reduced_now is None:
                return  # nothing that could be shown has stayed
        used, pieces = self.grads.used, self.params.pieces
        for piece, shard, grad in zip(pieces, self.shards, self.grads.pieces(pieces, self._cuts), strict=True):
            shard.grad = grad if used[piece.slot] else None

    def clear_grads(self, slots: set[int]) -> None:
        """Drop the gradients of the parameters in these slots, and those of the optimizer's pieces of them."""
        self.grads.clear(slots)
        self.unreduced = self.unreduced and len(slots) < len(self.params.params)
        for piece, shard in zip(self.params.pieces, self.shards, strict=True):
            if piece.slot in slots:
                shard.grad = None


AnyGroup = TypeVar("AnyGroup", bound=Group)


class Unit(Generic[AnyGroup]):
    """One or more groups, gathered, freed and reduced as one.

    Attributes:
        name: the module's name in the model; ``"root"`` for the root unit.
        module: the module whose forward uses the weights.
        read_in_backward: whether its backward uses them too, as an embedding's does not; if not, it gathers none.
        num_running_forwards, active: numbers of its calls in forward, without recomputation, and in backward now.
        entered: whether a call of the module is in forward now, or was recomputed and its backward has not ended.
        keep_unsharded_after: the forwards, by number, after which weights stay unsharded until backward is over,
            because no hook will tell when backward needs them.
    """

    def __init__(self, name: str, module: nn.Module, groups: list[AnyGroup], *, read_in_backward: bool = True) -> None:
        self.name, self.module, self.groups = name, module, groups
        self.read_in_backward = read_in_backward
        self.num_running_forwards = self.active = 0
        self.entered = False
        self.keep_unsharded_after: dict[int, object] = {}

    def forget_forwards(self, forwards: Iterable[int] | None = None) -> None:
        """Expect no more backwards of the forwards with these numbers; None: of any forward."""
        self.entered = self.num_running_forwards > 0
        if self.keep_unsharded_after:
            for index in list(self.keep_unsharded_after) if forwards is None else forwards:
                self.keep_unsharded_after.pop(index, None)

    def named_slots(self) -> Iterator[tuple[str, nn.Parameter, AnyGroup, int]]:
        """Yield ``(name, parameter, group, slot)`` of each parameter."""
        for group in self.groups:
            for index, (slot, param) in enumerate(zip(group.params.layout.slots, group.params.params, strict=True)):
                yield slot.name, param, group, index

    def wait_for_unshard(self) -> None:
        """Wait for the gather in flight."""
        for group in self.groups:
            if group.params.state.in_flight:
                group.params.wait_for_unshard()

    @property
    def readable(self) -> bool:
        """Whether the module's parameters are unsharded and current now, or will be after `wait_for_unshard`."""
        return all(group.params.state.readable for group in self.groups)

    def reshard(self) -> None:
        """Free the unsharded weights, if weights are sharded."""
        for group in self.groups:
            if group.params.state is not SHARDED:
                group.params.reshard()

    def trained_groups(self) -> list[AnyGroup]:
        """Return the groups that take gradients now, or may have some from a backward that did not reduce."""
        return [group for group in self.groups if group.trained or group.unreduced]

    def wait_for_reduce(self) -> None:
        """Wait for the reductions in flight."""
        for group in self.groups:
            group.grads.wait_for_reduce()


def kind_of(param: nn.Parameter) -> tuple[Hashable, ...]:
    """What parameters of one flat buffer have in common."""
    return param.dtype, param.device, param.requires_grad


def groups_of(
    name: str,
    params: Named,
    make: Callable[[str, Named], AnyGroup],
    kind: Callable[[nn.Parameter], Hashable] = kind_of,
) -> list[AnyGroup]:
    """Make the groups of the unit ``name``, one for each kind of its parameters."""
    by_kind: dict[Hashable, Named] = {}
    for param_name, param in params:
        by_kind.setdefault(kind(param), []).append((param_name, param))
    return [make(f"{name}#{index}" if index else name, some) for index, some in enumerate(by_kind.values())]


class UnitSpec(NamedTuple):
    """A unit before its buffers exist: the module whose calls use it, and its parameters by name."""

    name: str
    module: nn.Module
    params: Named

    @property
    def read_in_backward(self) -> bool:
        """Whether the module's backward reads its weights; the backward of a plain embedding lookup does not."""
        module = self.module
        plain = type(module) is nn.Embedding and list(own_parameters(module)) == ["weight"] and len(self.params) == 1
        return not plain or has_forward_hooks(module)


def partition(model: nn.Module, units: Iterable[nn.Module]) -> list[UnitSpec]:
    """Return the root unit, then one for each of the submodules ``units`` that has parameters, in the order given."""
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    root = UnitSpec("root", model, [])
    specs = {module: UnitSpec(names[module], module, []) for module in units if module is not model}
    homes: dict[nn.Parameter, UnitSpec] = {}
    visited: set[tuple[nn.Module, str]] = set()

    def walk(module: nn.Module, home: UnitSpec) -> None:
        home = specs.get(module, home)
        if (module, home.name) in visited:  # a module may be registered in several places
            return
        visited.add((module, home.name))
        for param in own_parameters(module).values():
            if param is not None:
                homes[param] = home if homes.get(param, home) is home else root
        for child in module.children():
            walk(child, home)

    walk(model, root)
    for name, param in model.named_parameters():
        homes[param].params.append((name, param))
    return [root, *(spec for spec in specs.values() if spec.params)]
