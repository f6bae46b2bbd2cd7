"""The tensors of an engine that are resident at this moment, each with a category.

Between steps a rank has what the stage table says that it keeps. While a step runs, unsharded weights and gradients of
a few units come on top, if these are sharded:

    params, master, grads, optimizer, ema    state that outlives its use
    outer                                    with local steps: global weights and momentum
    host_params, host_master, host_grads, host_optimizer    of units whose state is off the device
    disk_master, disk_grads, disk_optimizer, host_slots     in the rank's file, and the memory through which it goes
    unit_buffers                             unsharded weights of a unit in use, unsharded gradients not yet reduced
    prefetch                                 unsharded weights whose gather is in flight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.optim.classes.plain_states import tensors_of
from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit

Kept = Mapping[str, Sequence[tuple[str, Tensor]]]
"""Tensors beside weights, gradients and optimizer states, ``(unit's name, tensor)``, by category."""
Items = Callable[[Any], Iterable[tuple[Any, Any]]]


class Holding(NamedTuple):
    """A resident tensor of the engine.

    Attributes:
        category: its purpose; see the module's docstring.
        unit: the unit's name; empty for state of an optimizer or an average.
        tensor: the tensor. If several share a storage, count it for the first one that is yielded.
    """

    category: str
    unit: str
    tensor: Tensor


def resident_bytes(units: Iterable[FlatUnit], optimizers: Iterable[Optimizer], kept: Kept) -> dict[str, int]:
    """See `Zero.memory_bytes`."""
    units = list(units)
    total = {"params": 0, "grads": 0, "master": 0}
    found = list[tuple[str, int]]()
    for group in (group for unit in units for group in unit.groups):
        params, grads_away = group.params, group.grads.away_bytes
        total["params"] += params.full_bytes + sum(tensor.nbytes for tensor in params.transport.resident)
        total["grads"] += group.grads.resident_bytes - grads_away
        found += [(group.master_category, params.master_bytes), (group.category("grads"), grads_away)]
    total["optimizer"] = 0
    found += [
        (category, value.numel() * value.element_size()) for category, value in _states(units, optimizers, _settled)
    ]
    for category, num_bytes in found:
        total[category] = total.get(category, 0) + num_bytes
    return total | {category: sum(tensor.nbytes for _, tensor in named) for category, named in kept.items()}


def holdings(units: Iterable[FlatUnit], optimizers: Iterable[Optimizer], kept: Kept) -> Iterator[Holding]:
    """Yield every tensor that the engine keeps now; storages may be empty, and several tensors may share one.

    Nothing is waited for, so the collector may call it: an update that is under way may change values, and add states.
    """
    units = list(units)
    for unit in units:
        for group in unit.groups:
            yield from _weights(unit.name, group)
            yield from _grads(unit.name, group)
    yield from (Holding(category, "", value) for category, value in _states(units, optimizers, dict.items))
    for category, named in kept.items():
        yield from (Holding(category, unit, tensor) for unit, tensor in named)


def _settled(states: Any) -> Iterable[tuple[Any, Any]]:
    """The items once no update adds to them."""
    peek = getattr(states, "peek", None)
    return states.items() if peek is None else peek()


def _states(units: Iterable[FlatUnit], optimizers: Iterable[Optimizer], items: Items) -> Iterator[tuple[str, Tensor]]:
    """Yield the states of optimizers, with their categories: by where the piece is that they belong to."""
    away = [group for unit in units for group in unit.groups if group.place]
    homes = {shard: group for group in away for shard in group.shards_now}
    for optimizer in optimizers:
        for piece, state in list(items(optimizer.state)):
            home = homes.get(piece) if homes else None
            for value in tensors_of(state):
                yield "optimizer" if home is None else home.category("optimizer", value), value


def _weights(unit: str, group: FlatGroup) -> Iterator[Holding]:
    params = group.params
    if not params.shard_params:
        yield Holding("params", unit, params.full)
    else:
        yield Holding("prefetch" if params.state.in_flight else "unit_buffers", unit, params.full)
    yield from (Holding("prefetch", unit, tensor) for tensor in params.transport.in_flight)
    yield from (Holding("params", unit, tensor) for tensor in params.transport.resident)
    yield Holding(group.master_category, unit, params.master_now)


def _grads(unit: str, group: FlatGroup) -> Iterator[Holding]:
    grads = group.grads
    local, reduced, arriving = grads.buffers
    if reduced is not None:
        yield Holding(group.category("grads") if grads.away_bytes else "grads", unit, reduced)
    if local is not None:
        yield Holding("grads" if grads.keep_local else "unit_buffers", unit, local)
    if grads.reduction is not None and grads.reduction.packed is not None:
        yield Holding("unit_buffers", unit, grads.reduction.packed)
    yield from (Holding("grads", unit, tensor) for tensor in grads.running_tensors)
    if arriving is not None:
        yield Holding("grads", unit, arriving)
