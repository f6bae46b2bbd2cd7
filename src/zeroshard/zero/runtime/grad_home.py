"""`GradHome`: where the gradient of one parameter is stored in an engine's flat buffers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Protocol

from torch import Tensor, nn

from zeroshard.zero.buffers.unit import FlatGroup


class GradTaker(Protocol):
    """The engine, which is notified of each gradient."""

    def expect_grad(self, group: FlatGroup) -> None:
        """Begin a backward pass, if none runs, because a gradient of the group is about to arrive."""

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
