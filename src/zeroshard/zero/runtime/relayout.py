"""Moves weights and gradients to another layout between steps: for a new stage, or an optimizer of whole tensors.

This is refused while gradients wait for an optimizer step, because they would be lost, and inside `Runtime.pinned`,
which promises that all weights stay unsharded.
"""

from __future__ import annotations

from torch import nn

from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.strategy import ShardingStrategy


def groups_to_leave(runtime: Runtime, params: set[nn.Parameter]) -> list[FlatGroup]:
    """Return the groups that hold some of ``params`` and whose layout does not keep tensors whole."""
    return [group for group in runtime.groups() if not group.whole and not params.isdisjoint(group.params.params)]


def keep_whole(runtime: Runtime, params: set[nn.Parameter]) -> None:
    """Lay ``params`` out so that each tensor has one owner; see [Note: Laid out anew] in `unit`. Collective.

    Raises:
        RuntimeError: inside `Runtime.pinned`, or while gradients of these parameters or their neighbours wait for a
            step.
    """
    leaving = groups_to_leave(runtime, params)
    if runtime.is_pinned:
        raise RuntimeError("optimizer: it needs a new layout of the weights; make it outside full_params()")
    if runtime.unreduced or any(any(group.grads.used) for group in leaving):
        raise RuntimeError(
            "optimizer: it needs a new layout, in which gradients of the step under way would be lost; "
            "make it before backward, or after zero_grad()"
        )
    loads = [0] * (runtime.levels.shard.world_size * runtime.levels.parts)
    for unit in runtime.all_units():
        unit.keep_whole(params, loads)
    runtime.laid_out_anew(leaving)


def require_rest(runtime: Runtime, what: str) -> None:
    """Raise RuntimeError inside `Runtime.pinned`, or while gradients wait for a step."""
    if runtime.is_pinned:
        raise RuntimeError(f"{what}: it needs a new layout of the weights; call it outside full_params()")
    if runtime.unreduced or any(any(group.grads.used) for group in runtime.groups()):
        raise RuntimeError(f"{what}: gradients of the step under way would be lost; call it after zero_grad()")


def apply_strategy(runtime: Runtime, strategy: ShardingStrategy) -> None:
    """From now on shard weights and gradients as this row of the stage table says; groups have its layout already."""
    runtime.apply_strategy(strategy)
    runtime.collectives.row = f"an engine at {strategy.name}"
    runtime.forget_calls()
    runtime.laid_out_anew(runtime.groups())
