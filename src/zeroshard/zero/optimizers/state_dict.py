"""Converts the state of an optimizer over pieces to the state of the unsharded optimizer, and back.

The format is torch's: ``{"state": {number: {kind: tensor}}, "param_groups": [...]}``, with the model's parameters
numbered in the order of the groups. So ``torch.optim.AdamW(model.parameters()).load_state_dict(...)`` accepts it, and
``optimizer.load_state_dict`` accepts the state of that AdamW at any stage and world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.tensor_broadcast import broadcast_dicts
from zeroshard.host.lazily import loaded
from zeroshard.host.torch_internals import without_state_hooks
from zeroshard.optim.classes.kept_states import is_by_block, require_kept
from zeroshard.optim.classes.plain_states import flat, nested
from zeroshard.optim.classes.saved_states import NEVER_CUT, blocks_of, may_need_conversion
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.layout import Piece, Slot
from zeroshard.zero.core.optimizer import State, pieces_in
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer

_PER_PARAM = ("params", "param_names")
_OF_TORCH = ("state", "param_groups")


class Stateful(Protocol):
    """An object that has state for the pieces that it is given: an optimizer, or an average."""

    @property
    def state(self) -> MutableMapping[Any, State]:
        """States by piece, then by kind."""


def unsharded_state(piecewise: PiecewiseOptimizer, groups: Iterable[FlatGroup]) -> dict[str, Any]:
    """Return all states on the CPU, each in its parameter's shape. Collective if states are sharded.

    Args:
        piecewise: the optimizer.
        groups: every group that holds some of its parameters, in the same order on every rank.
    """
    members = piecewise.members
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for group in dict.fromkeys(groups):
        for slot, state in states_by_slot(group, piecewise.optimizer).items():
            if group.params.params[slot] in members:
                found[group.params.params[slot]] = _on_cpu(state)
    numbers = {param: number for number, param in enumerate(chain.from_iterable(piecewise.by_group))}
    packed = []
    for group, chosen in zip(piecewise.optimizer.param_groups, piecewise.by_group, strict=True):
        options = {key: value for key, value in group.items() if key not in _PER_PARAM}
        packed.append({**options, "params": [numbers[param] for param in chosen]})
    state = {number: found[param] for param, number in numbers.items() if param in found}
    others = deepcopy(_on_cpu(flat({"": of_no_param(piecewise.optimizer.state)})))[""]  # a step changes them in place
    return {"state": {**state, **others}, "param_groups": packed, **deepcopy(added_by_class(piecewise))}


def _on_cpu(state: Mapping[str, Any]) -> dict[Any, Any]:
    return nested({kind: value.cpu() if isinstance(value, Tensor) else value for kind, value in state.items()})


def of_no_param(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What an optimizer's state has under keys that are no parameters, such as MADGRAD's count of steps."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def added_by_class(piecewise: PiecewiseOptimizer) -> dict[str, Any]:
    """What the class's own ``state_dict`` adds to torch's: counts in attributes, say, which its load takes back."""
    optimizer = piecewise.optimizer
    if type(optimizer).state_dict is Optimizer.state_dict:
        return {}
    with without_state_hooks(optimizer), piecewise.at_pieces():
        found = type(optimizer).state_dict(optimizer)
    return {key: value for key, value in found.items() if key not in _OF_TORCH}


def states_by_slot(group: FlatGroup, holder: Stateful) -> dict[int, State]:
    """Return the unsharded states of each parameter of the group that has any, `flat`, by slot.

    Collective if the group is sharded.
    """
    params, by_slot = group.params, dict[int, list[tuple[Piece, State]]]()
    if not params.has_pieces:
        return {}
    own = [flat(holder.state.get(shard, {})) for shard in group.shards]
    pieces = zip(params.pieces, own, strict=True) if not params.shard_optim else _everybodys(group, own)
    for piece, state in pieces:
        by_slot.setdefault(piece.slot, []).append((piece, state))
    with_state = {slot: parts for slot, parts in by_slot.items() if any(state for _, state in parts)}
    slots = params.layout.slots
    return {
        slot: _joined(parts, slots[slot].shape, params.layout.block, kept_whole=group.keeps_tensors_whole)
        for slot, parts in with_state.items()
    }


def _everybodys(group: FlatGroup, own: list[State]) -> Iterator[tuple[Piece, State]]:
    """Yield the pieces of every rank with their states, in the order of ranks; ``own``: this rank's. Collective."""
    comm = group.params.comm
    for src in range(comm.world_size):
        mine = own if src == comm.rank else []
        states = broadcast_dicts(comm, mine, src, group.params.full.device, "optimizer/state")
        yield from zip(group.params.layout.owned(src), states, strict=True)


def _joined(parts: list[tuple[Piece, State]], shape: tuple[int, ...], block: int, *, kept_whole: bool) -> State:
    parts = sorted(parts, key=lambda part: part[0].interval)
    joined: State = {}
    for kind, first in parts[0][1].items():
        if not isinstance(first, Tensor):
            joined[kind] = first
        elif not kept_whole and kind not in NEVER_CUT and is_by_block(first.shape, parts[0][0].numel, block):
            joined[kind] = torch.cat([state[kind].detach() for _, state in parts])
        elif kept_whole or kind in NEVER_CUT or first.shape != parts[0][0].shape:
            joined[kind] = first.detach().clone()
        else:
            joined[kind] = torch.cat([state[kind].detach().reshape(-1) for _, state in parts]).view(shape)
    return joined


class CutState(NamedTuple):
    """An unsharded state, cut into pieces."""

    settings: list[dict[str, Any]]  # of each param group
    states: dict[nn.Parameter, State]  # by piece, in their order
    others: dict[Any, Any]  # of no parameter
    added: dict[str, Any]  # by the class, to torch's state dict


def cut_into_pieces(piecewise: PiecewiseOptimizer, state_dict: Mapping[str, Any]) -> CutState:
    """Cut an unsharded state into a state of this rank's pieces. Copies, no communication.

    Raises:
        ValueError: the groups are not the optimizer's, or the states are not those that it keeps of a parameter.
    """
    saved_groups = state_dict["param_groups"]
    numbered = set(chain.from_iterable(group["params"] for group in saved_groups))
    others = {key: deepcopy(value) for key, value in state_dict["state"].items() if key not in numbered}
    of_params = {key: flat(state) for key, state in state_dict["state"].items() if key in numbered}
    state_dict = {**state_dict, "state": of_params}
    sizes = [[len(group["params"]) for group in saved_groups], [len(chosen) for chosen in piecewise.by_group]]
    if sizes[0] != sizes[1]:
        raise ValueError(f"state_dict: its groups are of {sizes[0]} parameters, this optimizer's of {sizes[1]}")
    if any(may_need_conversion(piecewise.make, state) for state in state_dict["state"].values()):
        by_name = {fact.name: fact for facts in piecewise.facts() for fact in facts}
        facts = {key: by_name[piecewise.sharded.name(param)] for param, key in _pairs(piecewise, saved_groups)}
        # by its address: few dicts are converted
        as_kept = loaded("zeroshard.optim.state_conversion", "state_dict_as_kept")
        state_dict = as_kept(piecewise.make, piecewise.optimizer.param_groups, state_dict, facts)
        saved_groups = state_dict["param_groups"]
    saved = {
        param: state_dict["state"][key] for param, key in _pairs(piecewise, saved_groups) if key in state_dict["state"]
    }
    states = {piecewise.sharded.name(param): state for param, state in saved.items()}
    require_kept(piecewise.make, piecewise.optimizer.param_groups, saved_groups, piecewise.facts(), states)
    states_of_pieces: dict[nn.Parameter, State] = {}
    for param in chain.from_iterable(piecewise.by_group):
        home, slot = piecewise.homes[param]
        if saved.get(param):
            place, block = home.params.layout.slots[slot], home.params.layout.block
            for piece, own in pieces_in(home, slot):
                states_of_pieces[own] = nested(cut(saved[param], piece, place, block))
    settings = [{key: value for key, value in group.items() if key not in _PER_PARAM} for group in saved_groups]
    added = {key: deepcopy(value) for key, value in state_dict.items() if key not in _OF_TORCH}
    return CutState(settings, states_of_pieces, others, added)


def cut_states(piecewise: PiecewiseOptimizer) -> None:
    """Replace the optimizer's states by parameter with states by piece.

    Raises:
        ValueError: a state has another dtype than the master weights, as torch makes it if weights compute in 16 bits.
    """
    state = piecewise.optimizer.state
    cuts: dict[nn.Parameter, State] = {}
    for param in [param for param in chain.from_iterable(piecewise.by_group) if param in state]:
        group, slot = piecewise.homes[param]
        place = group.params.layout.slots[slot]
        whole = flat(state[param])
        for kind, value in whole.items():
            wide = isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) == place.shape
            wide = wide and kind not in NEVER_CUT
            if wide and value.dtype != group.params.master.dtype:
                raise ValueError(
                    f"step: {kind} of {place.name} is {value.dtype}, and its master {group.params.master.dtype}; "
                    "make the optimizer by zero.optimizer() and load its state there"
                )
        for piece, shard in pieces_in(group, slot):
            cuts[shard] = nested(cut(whole, piece, place, group.params.layout.block))
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


def cut(state: Mapping[str, Any], piece: Piece, slot: Slot, block: int = 1) -> State:
    """Return the part of a parameter's unsharded state, `flat`, that belongs to one piece of it; tensors are copies.

    ``block``: that of the layout, which cuts no such block of a parameter; a state may have one element for each.

    Raises:
        ValueError: a state is not in the parameter's shape, such as one rank's part of another layout.
    """
    found: State = {}
    for kind, value in state.items():
        if not isinstance(value, Tensor) or kind in NEVER_CUT:
            found[kind] = value.clone() if isinstance(value, Tensor) else value
        elif tuple(value.shape) == slot.shape:
            start, stop = piece.interval
            found[kind] = value.detach().reshape(-1)[start:stop].clone().view(piece.shape)
        elif is_by_block(tuple(value.shape), slot.numel, block):
            found[kind] = value.detach()[slice(*blocks_of(piece.interval, block))].clone()
        elif piece.shape != slot.shape and value.numel() > 1:
            raise ValueError(
                f"state_dict: {kind} of {slot.name} has the shape {tuple(value.shape)}, its parameter {slot.shape}; "
                "give the state, as zero.optim_state_dict() returns it"
            )
        else:
            found[kind] = value.clone()
    return found
