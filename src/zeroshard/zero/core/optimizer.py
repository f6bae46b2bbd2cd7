"""The user's optimizer over pieces: each rank updates its shard of the master weights, and has the states of no other.

    a parameter     [ . . . . . . . . . . . ]      what the user names, and the model computes with
    masters         |   rank 0   |   rank 1   |    of a flat group: a shard ends wherever it ends
    pieces          [ . . . . . .][ . . . . . ]    1-D views of this rank's master: what the class is given

A class whose update of an element depends on that element's own history alone (SGD, Adam, ...) computes the same on
pieces of a tensor as on all of it. It knows nothing of ranks.

[Note: One step]
    A step is the class's own ``step``, whoever calls it: `before_step` comes before its code and `after_step` after it,
    from hooks that torch runs around each ``step`` (`zeroshard.zero.optimizers.step_hooks` installs them).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Generic, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.zero.core.layout import Piece
from zeroshard.zero.core.units import AnyGroup, Group

Homes = dict[nn.Parameter, tuple[AnyGroup, int]]  # the group that holds a parameter, and its slot there
State = dict[str, Any]  # the states of a parameter, or of a piece, by kind


class StepListener(Protocol):
    """What is asked before a step, and told after it: `zeroshard.zero.engine_optimizers`."""

    def before_update(self, members: set[nn.Parameter]) -> None:
        """Refuse a step of the optimizer of these parameters (empty: one with a closure) that would be wrong."""

    def after_update(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """Note that a step of this optimizer is about to mark the weights of its parameters stale."""

    def clear_grads(self, params: set[nn.Parameter] | None, *, set_to_none: bool) -> None:
        """Clear the gradients of ``params`` (None: of all), or set them to zero."""


class PieceOptimizer(Generic[AnyGroup]):
    """An instance of the user's class, `optimizer`, over this rank's pieces of some of the model's parameters.

    Its steps are those of `optimizer`: [Note: One step]. They send nothing: weights are gathered before their next use.

    Attributes:
        listener: is asked before its steps, and told after them; None: nobody is.
        has_state: whether it has stepped, or state was loaded into it: the same on every rank.
    """

    listener: StepListener | None = None
    has_state = False

    def __init__(self, cls: type[Optimizer], params: Iterable[Any], homes: Homes[AnyGroup], /, **settings: Any) -> None:
        given = list(params)  # parameters, or dicts of some and their settings, as the class itself takes them
        if not given:
            raise ValueError("params: an empty list; give at least one parameter")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        self.homes, self.by_group = homes, [list(group["params"]) for group in groups]
        if any(param not in homes for param in chain.from_iterable(self.by_group)):
            raise ValueError("params: one is no parameter of the engine's model")
        self.hold_pieces()
        own = [{**group, "params": pieces} for group, pieces in zip(groups, self.pieces, strict=True)]
        self.optimizer: Optimizer = cls(own, **settings)

    def hold_pieces(self) -> None:
        """Take this rank's pieces, for each param group, in the flat groups that hold the parameters now."""
        self._members = {param for chosen in self.by_group for param in chosen}
        homes = [[self.homes[param] for param in chosen] for chosen in self.by_group]
        self.pieces = [[shard for home in chosen for _, shard in pieces_in(*home)] for chosen in homes]
        self.slots: dict[AnyGroup, set[int]] = {}  # of these parameters in each of the flat groups
        for group, slot in chain.from_iterable(homes):
            self.slots.setdefault(group, set()).add(slot)

    @property
    def members(self) -> set[nn.Parameter]:
        """The model's parameters that it updates."""
        return self._members

    def before_step(self) -> None:
        """Raise RuntimeError if gradients have accumulated that no backward has reduced, or the listener refuses."""
        if self.listener is not None:
            self.listener.before_update(self.members)
        elif any(group.unreduced for group in self.slots):
            raise RuntimeError("step: gradients were never reduced; let the last backward of a step reduce them")

    def after_step(self) -> None:
        """Mark the weights stale that the step may have changed, the same on every rank."""
        self.has_state = True
        if self.listener is not None:
            self.listener.after_update(self.optimizer, self.members)
        skips = type(self.optimizer).__module__.startswith("torch.optim.")  # parameters without a gradient
        for group, slots in self.slots.items():
            params, used = group.params.params, group.grads.used
            changed = [params[slot] for slot in slots if used[slot] or (params[slot].requires_grad and not skips)]
            if changed:
                torch.autograd.graph.increment_version(changed)  # a backward through an earlier graph must raise
                group.params.mark_stale()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters; without ``set_to_none`` the listener sets them to zero."""
        if self.listener is not None:
            self.listener.clear_grads(self.members, set_to_none=set_to_none)
            return
        for group, slots in self.slots.items():
            group.clear_grads(slots)


def pieces_in(group: Group, slot: int) -> list[tuple[Piece, nn.Parameter]]:
    """This rank's pieces of the parameter in a slot."""
    return [pair for pair in zip(group.params.pieces, group.shards, strict=True) if pair[0].slot == slot]
