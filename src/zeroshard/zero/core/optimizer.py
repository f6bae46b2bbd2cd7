"""The user's optimizer over pieces: each rank updates its shard of the master weights, and has the states of no other.

    a parameter     [ . . . . . . . . . . . ]      what the user names, and the model computes with
    masters         |   rank 0   |   rank 1   |    of a flat group: a shard ends wherever it ends
    pieces          [ . . . . . .][ . . . . . ]    1-D views of this rank's master: what the class is given

A class whose update of an element depends on that element's own history alone (SGD, Adam, ...) computes the same on
pieces of a tensor as on the whole tensor. It is an ordinary `torch.optim.Optimizer`, and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.agree import gather_bytes
from zeroshard.zero.core.layout import Piece, Slot

if TYPE_CHECKING:
    from zeroshard.zero.buffers.unit import FlatGroup

SCALAR_STATES = frozenset({"step", "eta", "mu", "mu_product"})  # torch keeps one number of each for a parameter
Homes = dict[nn.Parameter, tuple["FlatGroup", int]]  # the group that holds a parameter, and its slot there
State = dict[str, Any]  # the states of a parameter, or of a piece, by kind


class StepOperands:
    """Where a step finds its operands (masters, gradients, states): here, on the device and as the class takes them.

    A subclass keeps some in another way between steps: gradients in bfloat16, which the class's own code is shown in
    its pieces' dtype (`zeroshard.zero.optimizers.operands`); or states on the host, or on disk.
    """

    def elsewhere(self, pieces: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of the pieces of which operands must be brought."""
        return []

    def bring(self, pieces: Sequence[nn.Parameter]) -> None:
        """Bring the operands of these pieces, which are elsewhere."""

    def take_back(self) -> None:
        """Take back what was brought, with the values that it has now; nothing, if nothing is there."""


class PieceOptimizer:
    """An optimizer over this rank's pieces of parameters.

    Attributes:
        optimizer: an instance of exactly the class that was asked for; the keys of its ``state`` are pieces.
        make: makes another one, of the same class and settings, over the param groups that it is given.
        by_group, pieces: for each param group, the model's parameters, and this rank's pieces of them.
        slots: for each flat group that holds some of the parameters, their slots.
    """

    operands = StepOperands()

    def __init__(self, cls: type[Optimizer], params: Iterable[Any], homes: Homes, settings: dict[str, Any]) -> None:
        given = list(params)  # parameters, or dicts of some and their settings, as the class itself takes them
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        self.homes, self.make = homes, partial(cls, **settings)
        self.by_group: list[list[nn.Parameter]] = [list(group["params"]) for group in groups]
        self.hold_pieces()
        self.optimizer = self.make([{**group, "params": own} for group, own in zip(groups, self.pieces, strict=True)])

    def hold_pieces(self) -> None:
        """Take the pieces in the flat groups that hold the parameters now."""
        homes = [[self.homes[param] for param in chosen] for chosen in self.by_group]
        self.pieces = [[shard for home in chosen for _, shard in pieces_in(*home)] for chosen in homes]
        self.slots: dict[FlatGroup, set[int]] = {}
        for group, slot in chain.from_iterable(homes):
            self.slots.setdefault(group, set()).add(slot)

    def step(self) -> None:
        """Update this rank's pieces. No communication: weights are gathered before their next use."""
        self.before_step()
        self.operands.bring(self.operands.elsewhere(chain.from_iterable(self.pieces)))
        try:
            self.optimizer.step()
        finally:
            self.operands.take_back()
        self.after_step()

    def before_step(self) -> None:
        """Raise RuntimeError if gradients have accumulated that no backward has reduced."""
        if any(group.unreduced for group in self.slots):
            raise RuntimeError("step: gradients were never reduced; let the last backward of a step reduce them")

    def after_step(self) -> None:
        """Mark the weights stale that the step may have changed, the same on every rank."""
        skips = type(self.optimizer).__module__.startswith("torch.optim.")  # parameters without a gradient
        for group, slots in self.slots.items():
            params, used = group.params.params, group.grads.used
            changed = [params[slot] for slot in slots if used[slot] or (params[slot].requires_grad and not skips)]
            if changed:
                torch.autograd.graph.increment_version(changed)  # a backward through an earlier graph must raise
                group.params.mark_stale()

    def zero_grad(self) -> None:
        """Drop the gradients of the parameters."""
        for group, slots in self.slots.items():
            group.grads.clear(slots)
            group.unreduced = group.unreduced and len(slots) < len(group.params.params)
        for piece in chain.from_iterable(self.pieces):
            piece.grad = None

    def unsharded_states(self) -> dict[str, State]:
        """Return the states of whole parameters on the CPU, by the parameters' names: group by group. Collective."""
        found: dict[str, State] = {}
        for group in self.slots:
            slots = group.params.layout.slots
            for piece, state in _of_all_ranks(group, [self.optimizer.state.get(shard, {}) for shard in group.shards]):
                parts = found.setdefault(slots[piece.slot].name, {})
                for kind, value in state.items():
                    of_elements = isinstance(value, Tensor) and value.shape == piece.shape
                    parts[kind] = [*parts.get(kind, []), value] if of_elements else value
            for slot in slots:
                state = found.get(slot.name, {})
                state |= {kind: torch.cat(v).view(slot.shape) for kind, v in state.items() if isinstance(v, list)}
        return {name: state for name, state in found.items() if state}

    def load_unsharded_states(self, states: Mapping[str, State]) -> None:
        """Load what `unsharded_states` returned; each rank takes its pieces, and settings do not change."""
        loaded: list[State] = []
        for group, slot in (self.homes[param] for param in chain.from_iterable(self.by_group)):
            place = group.params.layout.slots[slot]
            loaded += [cut(states.get(place.name, {}), piece, place) for piece, _ in pieces_in(group, slot)]
        numbered = {number: state for number, state in enumerate(loaded) if state}
        # The class's own method knows the dtype and device of each kind of state.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": numbered})


def pieces_in(group: FlatGroup, slot: int) -> list[tuple[Piece, nn.Parameter]]:
    """This rank's pieces of the parameter in a slot."""
    return [pair for pair in zip(group.params.pieces, group.shards, strict=True) if pair[0].slot == slot]


def cut(state: Mapping[str, Any], piece: Piece, slot: Slot) -> State:
    """Return a piece's part of a parameter's states: of those in its shape; others, such as ``step``, are copied."""
    (start, stop), found = piece.interval, dict[str, Any]()
    for kind, value in state.items():
        if isinstance(value, Tensor) and value.shape == slot.shape and kind not in SCALAR_STATES:
            found[kind] = value.detach().reshape(-1)[start:stop].clone().view(piece.shape)
        else:
            found[kind] = value.clone() if isinstance(value, Tensor) else value
    return found


def _of_all_ranks(group: FlatGroup, own: list[State]) -> list[tuple[Piece, State]]:
    """The pieces of every rank with their states, in the order of ranks; ``own``: this rank's. Collective."""
    params, content = group.params, BytesIO()
    if not params.shard_optim:
        return list(zip(params.pieces, own, strict=True))
    torch.save(own, content)
    sent = [torch.load(BytesIO(each), "cpu") for each in gather_bytes(params.comm, content.getvalue())]
    return [pair for rank, states in enumerate(sent) for pair in zip(params.layout.owned(rank), states, strict=True)]
