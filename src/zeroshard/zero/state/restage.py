"""Change the row of the stage table between two steps, in memory: state moves, and no bit of it changes.

The flat layout depends on the world and the optimizer, never on the row. So if the optimizer is sharded before and
after, its states stay in place. If it was replicated, each rank keeps its own part and sends nothing. If it will be
replicated, every rank sends its part to all others. One group of parameters moves at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.comm.agree import agreement, send_bytes
from zeroshard.zero.buffers.layout import Piece
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.optimizers.piecewise import SCALAR_STATES
from zeroshard.zero.runtime.relayout import apply_strategy, require_rest
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.strategy import SHARD, ShardingStrategy
from zeroshard.zero.tensor_broadcast import PendingBroadcasts

State = dict[str, Any]  # the states of one piece, by kind


class Stateful(Protocol):
    """An object that has state for the pieces that it is given: an optimizer, or an average."""

    @property
    def state(self) -> MutableMapping[Any, State]:
        """States by piece, then by kind."""
        ...


def restage(runtime: Runtime, strategy: ShardingStrategy, holders: Sequence[Stateful]) -> None:
    """Rebuild every group by another row, with its weights and the states that ``holders`` have of it. Collective.

    Afterwards the caller must give the optimizers the new groups' ``shards``.

    Raises:
        RuntimeError: inside `Runtime.pinned`, or while gradients wait for a step.
        ValueError: a state that is neither tensor nor number; then nothing has changed.
    """
    require_rest(runtime, "restage")
    if any(_sends(group, strategy) for group in runtime.groups()):
        with agreement(runtime.comm):  # an error is raised on every rank, before anything has changed
            _require_sendable(runtime, strategy, holders)
    for unit in runtime.all_units():
        for index, old in enumerate(unit.groups):
            unit.groups[index] = new = old.restaged(strategy)
            if _sends(old, strategy):
                found = list(_everybodys(old, _own(old, holders)))
            else:
                found = _own(old, holders)
            _hand_over(new, holders, found)
            del old
    apply_strategy(runtime, strategy)


def _sends(group: FlatGroup, strategy: ShardingStrategy) -> bool:
    """Whether ranks must send the group's states: they are sharded now, and will be replicated."""
    return group.params.shard_optim and strategy.optim is not SHARD


def _require_sendable(runtime: Runtime, strategy: ShardingStrategy, holders: Sequence[Stateful]) -> None:
    for group in runtime.groups():
        if _sends(group, strategy):
            for shard in group.shards:
                for holder in holders:
                    _describe(holder.state.get(shard, {}))


def _own(group: FlatGroup, holders: Sequence[Stateful]) -> list[tuple[Piece, list[State]]]:
    """Take the states of each piece on this rank out of the holders, and return them."""
    found = _shared(group, holders)
    for shard in group.shards:
        for holder in holders:
            holder.state.pop(shard, None)
    return found


def _shared(group: FlatGroup, holders: Sequence[Stateful]) -> list[tuple[Piece, list[State]]]:
    """Return each piece on this rank with each holder's states of it."""
    pairs = zip(group.params.pieces, group.shards, strict=True)
    return [(piece, [holder.state.get(shard, {}) for holder in holders]) for piece, shard in pairs]


def states_of(group: FlatGroup, holders: Sequence[Stateful]) -> Iterator[tuple[Piece, list[State]]]:
    """Yield each piece of the group, from all ranks, with each holder's states of it. Collective if it is sharded."""
    own = _shared(group, holders)
    yield from _everybodys(group, own) if group.params.shard_optim else own


def _everybodys(group: FlatGroup, own: list[tuple[Piece, list[State]]]) -> Iterator[tuple[Piece, list[State]]]:
    """Yield the pieces of every rank with their states, in the order of ranks; ``own``: this rank's. Collective."""
    comm, device = group.params.comm, group.params.master.device
    for src in range(comm.world_size):
        mine = [states for _, states in own] if src == comm.rank else []
        pieces = group.params.layout.owned(src)
        yield from zip(pieces, _sent(comm, src, mine, device), strict=True)


def _sent(comm: Communicator, src: int, mine: list[list[State]], device: torch.device) -> list[list[State]]:
    """Return rank ``src``'s states, on every rank. Collective."""
    description = json.loads(
        send_bytes(comm, json.dumps([[_describe(s) for s in each] for each in mine]).encode(), src)
    )
    received = mine if comm.rank == src else [[_empty(s) for s in each] for each in description]
    pending = PendingBroadcasts(comm, "restage/state")
    homes: list[tuple[State, str, Tensor]] = []
    for each in received:
        for state in each:
            for kind, value in state.items():
                if isinstance(value, Tensor):  # a step count may lie on the CPU, though the weights are on a GPU
                    there = value.to(device).contiguous()
                    pending.issue([there], src)
                    homes.append((state, kind, there))
    pending.wait()
    for state, kind, there in homes:
        if comm.rank != src:
            state[kind] = there.to(state[kind].device)
    return received


def _describe(state: State) -> list[tuple[str, Any]]:
    return [(kind, _facts(kind, value)) for kind, value in state.items()]


def _facts(kind: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(
        f"{kind}: a {type(value).__name__} in an optimizer's state cannot be sent; keep dense tensors or numbers"
    )


def _empty(description: list[tuple[str, Any]]) -> State:
    """Return a state with uninitialised tensors of the described dtypes and shapes; numbers are final already."""
    return {
        kind: torch.empty(facts[1], dtype=getattr(torch, facts[0]), device=facts[2])
        if isinstance(facts, list)
        else facts
        for kind, facts in description
    }


def _hand_over(group: FlatGroup, holders: Sequence[Stateful], found: list[tuple[Piece, list[State]]]) -> None:
    """Give each holder its states for each piece of the new group, cut or joined from the pieces in ``found``."""
    by_slot: dict[int, list[tuple[Piece, list[State]]]] = {}
    for piece, states in found:
        by_slot.setdefault(piece.slot, []).append((piece, states))
    for piece, shard in zip(group.params.pieces, group.shards, strict=True):
        start, stop = piece.interval
        parts = [
            (part, states)
            for part, states in by_slot.get(piece.slot, [])
            if part.interval[0] < stop and start < part.interval[1]
        ]
        for index, holder in enumerate(holders):
            state = _joined(piece, shard, [(part, states[index]) for part, states in parts])
            if state:
                holder.state[shard] = state


def _joined(piece: Piece, shard: nn.Parameter, parts: list[tuple[Piece, State]]) -> State:
    """Return the state of ``piece``, joined from the pieces that make it up, or cut out of one that contains it."""
    if not parts or (len(parts) == 1 and parts[0][0].interval == piece.interval):
        return parts[0][1] if parts else {}
    joined: State = {}
    for kind, first in parts[0][1].items():
        if not isinstance(first, Tensor):
            joined[kind] = first
        elif kind in SCALAR_STATES or first.shape != parts[0][0].shape:
            joined[kind] = first.clone()
        else:
            cuts = [
                state[kind].view(-1)[
                    max(piece.interval[0] - part.interval[0], 0) : piece.interval[1] - part.interval[0]
                ]
                for part, state in parts
            ]
            joined[kind] = torch.cat(cuts).view(shard.shape)
    return joined
