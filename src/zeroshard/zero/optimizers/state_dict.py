"""Converts the state of an optimizer over pieces to the state of the unsharded optimizer, and back.

The format is torch's: ``{"state": {number: {kind: tensor}}, "param_groups": [...]}``, with the model's parameters
numbered in the order of the groups. So ``torch.optim.AdamW(model.parameters()).load_state_dict(...)`` accepts it, and
``optimizer.load_state_dict`` accepts the state of that AdamW at any stage and world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.zero.buffers.layout import Piece
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.optimizers.kept_states import require_kept
from zeroshard.zero.optimizers.piecewise import SCALAR_STATES, PiecewiseOptimizer
from zeroshard.zero.state.restage import State, states_of

_PER_PARAM = ("params", "param_names")


def whole_here(piecewise: PiecewiseOptimizer) -> dict[str, Any]:
    """Return `whole_state` without communication, if this rank has all states.

    Raises:
        RuntimeError: this rank has only a part of the states.
    """
    groups = [piecewise.sharded.home(param)[0] for param in piecewise.members]
    if any(group.params.shard_optim for group in groups):
        raise RuntimeError(
            "optimizer.state_dict(): each rank holds a part of the states; use zero.optim_state_dict(optimizer) on "
            "every rank, or zeroshard.save()"
        )
    return whole_state(piecewise, groups)


def whole_state(piecewise: PiecewiseOptimizer, groups: Iterable[FlatGroup]) -> dict[str, Any]:
    """Return all states on the CPU, each in its parameter's shape. Collective if states are sharded.

    Args:
        piecewise: the optimizer.
        groups: every group that holds some of its parameters, in the same order on every rank.
    """
    members = piecewise.members
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for group in dict.fromkeys(groups):
        by_slot: dict[int, list[tuple[Piece, State]]] = {}
        for piece, states in states_of(group, [piecewise.optimizer]):
            by_slot.setdefault(piece.slot, []).append((piece, states[0]))
        for slot, parts in by_slot.items():
            param = group.params.params[slot]
            if param in members and any(state for _, state in parts):
                found[param] = _joined(parts, group.params.layout.slots[slot].shape, whole=group.whole)
    numbers = {param: number for number, param in enumerate(chain.from_iterable(piecewise.by_group))}
    packed = []
    for group, chosen in zip(piecewise.optimizer.param_groups, piecewise.by_group, strict=True):
        options = {key: value for key, value in group.items() if key not in _PER_PARAM}
        packed.append({**options, "params": [numbers[param] for param in chosen]})
    state = {number: found[param] for param, number in numbers.items() if param in found}
    others = {key: value for key, value in piecewise.optimizer.state.items() if not isinstance(key, Tensor)}
    return {"state": {**state, **others}, "param_groups": packed}


def _joined(parts: list[tuple[Piece, State]], shape: tuple[int, ...], *, whole: bool) -> State:
    parts = sorted(parts, key=lambda part: part[0].interval)
    joined: State = {}
    for kind, first in parts[0][1].items():
        if not isinstance(first, Tensor):
            joined[kind] = first
        elif whole or kind in SCALAR_STATES or first.shape != parts[0][0].shape:
            joined[kind] = first.detach().cpu().clone()
        else:
            flat = [state[kind].detach().reshape(-1).cpu() for _, state in parts]
            joined[kind] = torch.cat(flat).view(shape)
    return joined


def cut_into_pieces(piecewise: PiecewiseOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Cut an unsharded state into a state of this rank's pieces, numbered in their order. Copies, no communication.

    Raises:
        ValueError: the groups are not the optimizer's, or the states are not those that it keeps of a parameter.
    """
    saved_groups = state_dict["param_groups"]
    sizes = [[len(group["params"]) for group in saved_groups], [len(chosen) for chosen in piecewise.by_group]]
    if sizes[0] != sizes[1]:
        raise ValueError(f"state_dict: its groups are of {sizes[0]} parameters, this optimizer's of {sizes[1]}")
    saved = {
        param: state_dict["state"][key] for param, key in _pairs(piecewise, saved_groups) if key in state_dict["state"]
    }
    states = {piecewise.sharded.name(param): state for param, state in saved.items()}
    require_kept(piecewise.make, piecewise.optimizer.param_groups, saved_groups, piecewise.facts(), states)
    state: dict[int, State] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, chosen in zip(saved_groups, piecewise.by_group, strict=True):
        first = number
        for param in chosen:
            home, slot = piecewise.sharded.home(param)
            for piece, _ in home.shards_of(slot):
                if saved.get(param):
                    layout_shape = home.params.layout.slots[slot].shape
                    state[number] = cut(saved[param], piece, layout_shape, home.params.layout.slots[slot].name)
                number += 1
        options = {key: value for key, value in group.items() if key not in _PER_PARAM}
        groups.append({**options, "params": list(range(first, number))})
    numbered = {key: value for key, value in state_dict["state"].items() if not isinstance(key, int | str)}
    return {"state": {**numbered, **state}, "param_groups": groups}


def cut_states(piecewise: PiecewiseOptimizer) -> None:
    """Replace the optimizer's states by parameter with states by piece.

    Raises:
        ValueError: a state has another dtype than the master weights, as torch makes it if weights compute in 16 bits.
    """
    state = piecewise.optimizer.state
    cuts: dict[nn.Parameter, State] = {}
    for param in [param for param in chain.from_iterable(piecewise.by_group) if param in state]:
        group, slot = piecewise.sharded.home(param)
        place = group.params.layout.slots[slot]
        for kind, value in state[param].items():
            wide = isinstance(value, Tensor) and value.is_floating_point() and kind not in SCALAR_STATES
            if wide and value.dtype != group.params.master.dtype:
                raise ValueError(
                    f"step: {kind} of {place.name} is {value.dtype}, and its master {group.params.master.dtype}; "
                    "make the optimizer by zero.optimizer() and load its state there"
                )
        for piece, shard in group.shards_of(slot):
            cuts[shard] = cut(state[param], piece, place.shape, place.name)
    for param in piecewise.members:
        state.pop(param, None)
    for shard, kept in cuts.items():
        state[shard] = kept


def _pairs(piecewise: PiecewiseOptimizer, saved_groups: list[Mapping[str, Any]]) -> Iterator[tuple[nn.Parameter, Any]]:
    """Each parameter with the key of its saved state: a number in the order of the groups, or the parameter's name."""
    for saved, chosen in zip(saved_groups, piecewise.by_group, strict=True):
        keys = saved["params"]
        if all(isinstance(key, str) for key in keys):
            names = {piecewise.sharded.name(param): param for param in chosen}
            if set(names) != set(keys):
                raise ValueError(
                    f"state_dict: a group is of {sorted(set(keys) ^ set(names))[0]}, which only one side has"
                )
            yield from ((names[key], key) for key in keys)
        else:
            yield from zip(chosen, keys, strict=True)


def cut(state: Mapping[str, Any], piece: Piece, shape: tuple[int, ...], name: str) -> State:
    """Return the part of a parameter's unsharded state that belongs to one piece of it; tensors are copies.

    Raises:
        ValueError: a state is not in the parameter's shape, such as one rank's part of another layout.
    """
    found: State = {}
    for kind, value in state.items():
        if not isinstance(value, Tensor) or kind in SCALAR_STATES:
            found[kind] = value.clone() if isinstance(value, Tensor) else value
        elif tuple(value.shape) == shape:
            start, stop = piece.interval
            found[kind] = value.detach().reshape(-1)[start:stop].clone().view(piece.shape)
        elif piece.shape != shape and value.numel() > 1:
            raise ValueError(
                f"state_dict: {kind} of {name} has the shape {tuple(value.shape)}, its parameter {shape}; give the "
                "state, as zero.optim_state_dict() returns it"
            )
        else:
            found[kind] = value.clone()
    return found
