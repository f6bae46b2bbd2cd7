"""The tensors of an engine that are resident at this moment, each with a category.

Between steps a rank has what the stage table says that it keeps. While a step runs, unsharded weights and gradients of
a few units come on top, if these are sharded:

    params, master, grads, optimizer, ema    state that outlives its use
    outer                                    with local steps: global weights and momentum
    unit_buffers                             unsharded weights of a unit in use, unsharded gradients not yet reduced
    prefetch                                 unsharded weights whose gather is in flight
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.zero.buffers.flat_grads import FlatGrads
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.unit import Unit

Kept = Mapping[str, Sequence[tuple[str, Tensor]]]
"""Tensors beside weights, gradients and optimizer states, ``(unit's name, tensor)``, by category."""


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


def resident_bytes(units: Iterable[Unit], optimizers: Iterable[Optimizer], kept: Kept) -> dict[str, int]:
    """See `Zero.memory_bytes`."""
    total = {"params": 0, "grads": 0, "master": 0}
    for group in (group for unit in units for group in unit.groups):
        params = group.params
        total["params"] += params.full_bytes + sum(tensor.nbytes for tensor in params.transport.resident)
        same_dtype = params.master.dtype == params.full.dtype
        total["params" if same_dtype else "master"] += params.master_bytes
        total["grads"] += group.grads.resident_bytes
    total["optimizer"] = sum(value.numel() * value.element_size() for value in _states(optimizers))
    return total | {category: sum(tensor.nbytes for _, tensor in named) for category, named in kept.items()}


def holdings(units: Iterable[Unit], optimizers: Iterable[Optimizer], kept: Kept) -> Iterator[Holding]:
    """Yield every tensor that the engine keeps now; storages may be empty, and several tensors may share one."""
    for unit in units:
        for group in unit.groups:
            yield from _weights(unit.name, group.params)
            yield from _grads(unit.name, group.grads)
    yield from (Holding("optimizer", "", value) for value in _states(optimizers))
    for category, named in kept.items():
        yield from (Holding(category, unit, tensor) for unit, tensor in named)


def _states(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    return (value for state in states for value in state.values() if isinstance(value, Tensor))


def _weights(unit: str, params: FlatParams) -> Iterator[Holding]:
    if not params.shard_params:
        yield Holding("params", unit, params.full)
    else:
        yield Holding("prefetch" if params.gather_in_flight else "unit_buffers", unit, params.full)
    yield from (Holding("prefetch", unit, tensor) for tensor in params.transport.in_flight)
    yield from (Holding("params", unit, tensor) for tensor in params.transport.resident)
    same_dtype = params.master.dtype == params.full.dtype
    yield Holding("params" if same_dtype else "master", unit, params.master)


def _grads(unit: str, grads: FlatGrads) -> Iterator[Holding]:
    local, reduced, arriving = grads.buffers
    if local is not None:
        yield Holding("grads" if grads.keep_local else "unit_buffers", unit, local)
    if grads.packed is not None:
        yield Holding("unit_buffers", unit, grads.packed)
    yield from (Holding("grads", unit, tensor) for tensor in grads.reducer.tensors)
    yield from (Holding("grads", unit, tensor) for tensor in (reduced, arriving) if tensor is not None)
