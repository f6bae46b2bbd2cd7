"""Save the engine's training state as `NamedShard`s, and load it from them.

The pieces of a parameter and of its optimizer states have the same intervals. A state that is one number for a whole
parameter (AdamW's ``step``) is written by the rank that owns the parameter's first element. If tensors are whole, the
tensor's owner writes each state unsharded, in the shape that it has (Adafactor's ``row_var``). If the optimizer is
replicated, each rank writes the part that it would own otherwise. If there are replicas, the first one writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.host.lazily import loaded
from zeroshard.optim.classes.kept_states import Kept, is_by_block
from zeroshard.optim.classes.plain_states import flat, nested
from zeroshard.optim.classes.saved_states import NEVER_CUT, blocks_of, kept_by, may_need_conversion, read_states
from zeroshard.optim.named_shards import (
    MODEL_KINDS,
    ROUNDING,
    SCALAR_KINDS,
    NamedShard,
    ShardReader,
    of_optimizer,
    persistent_buffers,
    read_whole,
    require_shape,
)
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.optimizers.adoption import has_owner
from zeroshard.zero.optimizers.methods import StateLoad
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer
from zeroshard.zero.optimizers.state_dict import Stateful, added_by_class, of_no_param
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.state.full_state import take_names

_BESIDE, _ADDED = "state", "added"  # kinds, before they are made flat, of states of no parameter, and of the class


def named_shards(
    model: nn.Module, runtime: Runtime, holders: Sequence[Stateful], optimizers: Sequence[PiecewiseOptimizer]
) -> Iterator[NamedShard]:
    """See `Zero.named_shards`; ``holders``: of all states by piece, ``optimizers``: of states of no parameter too."""
    if not runtime.rank_groups.writes:
        return
    take_names(model, runtime)
    rank = runtime.rank_groups.shard_group.rank
    for group in runtime.groups():
        group.params.take_changes()
        first, block = group.params.layout.slots[0].name, group.params.layout.block
        rounding = group.grads.reducer.rounding
        if rounding is not None and any(own.slot == own.interval[0] == 0 for own in group.params.layout.owned(rank)):
            yield NamedShard(first, ROUNDING, (), (0, 1), torch.tensor([rounding.next_step]))
        yield from group.params.beside_values(rank)
        for piece, shard in zip(group.params.pieces, group.shards, strict=True):
            slot = group.params.layout.slots[piece.slot]
            if group.params.params[piece.slot] in group.params.absent:
                continue
            for own in group.params.layout.owned(rank):
                if own.slot != piece.slot or not piece.interval[0] <= own.interval[0] < piece.interval[1]:
                    continue
                cut = slice(own.interval[0] - piece.interval[0], own.interval[1] - piece.interval[0])
                weights = shard.detach().view(-1)[cut].to(group.params.dtype)
                yield NamedShard(slot.name, "param", slot.shape, own.interval, weights)
                for kind, value in _states(holders, shard):
                    if group.keeps_tensors_whole:
                        flat = value.contiguous().view(-1)
                        yield NamedShard(slot.name, kind, tuple(value.shape), (0, value.numel()), flat)
                    elif value.shape == shard.shape and kind not in NEVER_CUT:
                        yield NamedShard(slot.name, kind, slot.shape, own.interval, value[cut])
                    elif kind not in NEVER_CUT and is_by_block(value.shape, piece.numel, block):
                        shape, part = (-(-slot.numel // block),), slice(*blocks_of((cut.start, cut.stop), block))
                        yield NamedShard(slot.name, kind, shape, blocks_of(own.interval, block), value[part])
                    elif own.interval[0] == 0:
                        shape = () if value.numel() == 1 else tuple(value.shape)
                        yield NamedShard(slot.name, kind, shape, (0, value.numel()), value.reshape(-1))
    yield from _beside_params(optimizers, rank)
    if rank == 0:
        for group in runtime.groups():
            for slot, param in zip(group.params.layout.slots, group.params.params, strict=True):
                if 0 in slot.shape and param not in group.params.absent and group.params.has_pieces:
                    # No rank owns a piece of it, yet a load at another stage asks for its name.
                    yield NamedShard(slot.name, "param", slot.shape, (0, 0), group.params.full[:0])
        for name, kind, tensor in _beside(model):
            yield NamedShard(name, kind, tuple(tensor.shape), (0, tensor.numel()), tensor.detach().reshape(-1))


def load_named_shards(
    model: nn.Module, runtime: Runtime, optimizers: Sequence[PiecewiseOptimizer], reader: ShardReader
) -> set[nn.Parameter]:
    """See `Zero.load_named_shards`. Returns the parameters with saved states that no optimizer took."""
    members = {param for optimizer in optimizers for param in optimizer.members}
    missed: set[nn.Parameter] = set()
    loads = [_read_beside_params(reader, *each) for each in enumerate(optimizers)]
    take_names(model, runtime)
    _require_shapes(model, runtime, reader)
    kept: dict[str, Kept] = {}
    for optimizer in optimizers:
        groups = list(zip(optimizer.optimizer.param_groups, optimizer.facts(), strict=True))
        names = (param.name for _, params in groups for param in params)
        if any(may_need_conversion(optimizer.make, reader.kinds(name)) for name in names):
            # By its address: few loads convert states, and what converts them knows the codes of kernels.
            as_kept = loaded("zeroshard.optim.state_conversion", "as_kept")
            reader = as_kept(optimizer.make, groups, reader, say=runtime.rank_groups.world.rank == 0)
        kept.update(kept_by(optimizer.make, groups, reader))
    with torch.no_grad():
        for group in runtime.groups():
            for slot, param in zip(group.params.layout.slots, group.params.params, strict=True):
                if param not in members | group.params.absent and not MODEL_KINDS.issuperset(reader.kinds(slot.name)):
                    missed.add(param)
            group.params.load_values(reader)
            states: dict[nn.Parameter, dict[str, Any]] = {}
            for piece, shard in zip(group.params.pieces, group.shards, strict=True):
                slot = group.params.layout.slots[piece.slot]
                if group.params.params[piece.slot] in group.params.absent:
                    continue
                shard.copy_(reader.read(slot.name, "param", piece.interval).view(piece.shape))
                if slot.name in kept:
                    interval = None if group.keeps_tensors_whole else piece.interval
                    own = kept[slot.name], slot.shape, interval, group.params.layout.block
                    states[shard] = read_states(reader, slot.name, *own)
            torch.autograd.graph.increment_version(group.params.params)  # a backward through an older graph must fail
            group.params.mark_stale()
            _load_rounding(group, reader)
            for load in loads:
                load.take(group, states)
        for name, kind, tensor in _beside(model):
            if kind in reader.kinds(name):
                tensor.copy_(read_whole(reader, name, kind, tuple(tensor.shape)))
    for load in loads:
        load.end()
    return missed


def _require_shapes(model: nn.Module, runtime: Runtime, reader: ShardReader) -> None:
    """Raise before anything is loaded if a parameter was not saved, or if it or a buffer has another shape."""
    for group in runtime.groups():
        group.params.require_saved(reader)
        pairs = zip(group.params.layout.slots, group.params.params, strict=True)
        for slot in (slot for slot, param in pairs if param not in group.params.absent):
            for kind in reader.kinds(slot.name).keys() & MODEL_KINDS - {"param", "buffer"}:
                require_shape(reader, slot.name, kind, () if kind in SCALAR_KINDS else slot.shape)
    for name, kind, tensor in _beside(model):
        if kind in reader.kinds(name):
            require_shape(reader, name, kind, tuple(tensor.shape))


def _beside(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """``(name, kind, tensor)`` of frozen parameters that came later, which no engine has, and of buffers."""
    yield from ((name, "param", param) for name, param in model.named_parameters() if not has_owner(param))
    yield from ((name, "buffer", buffer) for name, buffer in persistent_buffers(model).items())


def _load_rounding(group: FlatGroup, reader: ShardReader) -> None:
    """Load the step that numbers the group's next stochastic rounding; it lags if parameters were frozen for a time."""
    names = (slot.name for slot in group.params.layout.slots)
    saved = next((name for name in names if ROUNDING in reader.kinds(name)), None)
    rounding = group.grads.reducer.rounding
    if saved is not None and rounding is not None:
        rounding.loaded(int(reader.read(saved, ROUNDING, (0, 1))))


def _states(holders: Sequence[Stateful], shard: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    for holder in holders:
        try:
            plain = holder.state.get(shard, {})
            plain = flat(plain) if isinstance(holder, Optimizer) else plain  # an average has its own name
        except ValueError as error:
            raise ValueError(f"{type(holder).__name__}: a checkpoint cannot hold {error}") from None
        yield from ((kind, torch.as_tensor(value)) for kind, value in plain.items())


def _beside_params(optimizers: Sequence[PiecewiseOptimizer], rank: int) -> Iterator[NamedShard]:
    """Yield what each optimizer keeps of no parameter, on the rank that has the first element of its first one."""
    for number, piecewise in enumerate(optimizers):
        homes = (piecewise.homes[param] for chosen in piecewise.by_group for param in chosen if param.numel())
        group, slot = next(homes, (None, 0))
        others = {_BESIDE: of_no_param(piecewise.optimizer.state), _ADDED: added_by_class(piecewise)}
        if group is None or not any(others.values()):
            continue
        if any(own.slot == slot and own.interval[0] == 0 for own in group.params.layout.owned(rank)):
            for kind, value in flat(others).items():
                yield NamedShard(of_optimizer(number), kind, tuple(value.shape), (0, value.numel()), value.reshape(-1))


def _read_beside_params(reader: ShardReader, number: int, piecewise: PiecewiseOptimizer) -> StateLoad:
    """Return the load of an optimizer, with what `_beside_params` saved; with what it has now, if nothing was saved."""
    now, name = of_no_param(piecewise.optimizer.state), of_optimizer(number)
    saved = {kind: read_whole(reader, name, kind, shape) for kind, shape in reader.kinds(name).items()}
    found = nested(saved)
    for key, value in found.get(_BESIDE, {}).items():
        there = now.get(key)
        now[key] = value.to(there.device) if isinstance(value, Tensor) and isinstance(there, Tensor) else value
    return StateLoad(piecewise, others=now, added=found.get(_ADDED) or added_by_class(piecewise))
