"""Moves weights and gradients to another layout between steps: for a new stage, or an optimizer of whole tensors.

This is refused while gradients wait for an optimizer step, because they would be lost, and inside `Zero.full_params`,
which promises that all weights stay unsharded. The layout depends on the world and the optimizer, never on the row of
the stage table: for a new row the weights and states of one group of parameters at a time are gathered from the
buffers of the old row, and each rank keeps what it has in those of the new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from zeroshard.comm.agree import agreement
from zeroshard.comm.tensor_broadcast import describe
from zeroshard.optim.classes.plain_states import flat, nested
from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit, LaysOut
from zeroshard.zero.core.layout import WHOLE
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.optimizers.state_dict import Stateful, cut, states_by_slot
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.whole_tensors.layout import balanced, in_blocks


def groups_to_leave(runtime: Runtime, blocks: Mapping[nn.Parameter, int]) -> list[FlatGroup]:
    """Return the groups that hold some of these parameters and whose layout may cut such a block of them."""
    return [
        group
        for group in runtime.groups()
        if not all(group.keeps_blocks(blocks.get(param, 1)) for param in group.params.params)
    ]


def keep_blocks(runtime: Runtime, blocks: Mapping[nn.Parameter, int]) -> None:
    """Lay the parameters out so that none is cut inside a block, or at all if its block is `WHOLE`. Collective.

    See [Note: Laid out anew] in `unit`.

    Raises:
        RuntimeError: inside `Zero.full_params`, or while gradients of these parameters or their neighbours wait for a
            step.
    """
    leaving = groups_to_leave(runtime, blocks)
    if runtime.pinned:
        raise RuntimeError("optimizer: it needs a new layout of the weights; make it outside full_params()")
    if runtime.unreduced or any(any(group.grads.used) for group in leaving):
        raise RuntimeError(
            "optimizer: it needs a new layout, in which gradients of the step under way would be lost; "
            "make it before backward, or after zero_grad()"
        )
    loads = [0] * (runtime.rank_groups.shard_group.world_size * runtime.rank_groups.parts)
    for block in sorted(set(blocks.values())):
        chosen = {param for param, own in blocks.items() if own == block}
        lay_out = balanced(loads) if block == WHOLE else in_blocks(block)
        for unit in runtime.all_units():
            lay_out_anew(unit, chosen, block, lay_out)
    runtime.laid_out_anew(leaving)


def lay_out_anew(unit: FlatUnit, chosen: set[nn.Parameter], block: int, lay_out: LaysOut) -> None:
    """Move the chosen parameters of a unit to groups that keep such blocks. Collective; see that of `FlatGroup`."""
    for index, group in enumerate(list(unit.groups)):
        moving = chosen.intersection(group.params.params)
        if moving and not group.keeps_blocks(block):
            first, *second = group.lay_out_anew(moving, f"{unit.name}#{len(unit.groups)}", lay_out)
            unit.groups[index] = first
            unit.groups += second


def restage(runtime: Runtime, strategy: ShardingStrategy, holders: Sequence[Stateful]) -> None:
    """Rebuild every group by another row, with its weights and the states that ``holders`` have of it. Collective.

    Afterwards the caller must give the optimizers the new groups' ``shards``.

    Raises:
        RuntimeError: inside `Zero.full_params`, or while gradients wait for a step.
        ValueError: a state that is neither a tensor nor plain; then nothing has changed.
    """
    if runtime.pinned:
        raise RuntimeError("restage: it needs a new layout of the weights; call it outside full_params()")
    if runtime.unreduced or any(any(group.grads.used) for group in runtime.groups()):
        raise RuntimeError("restage: gradients of the step under way would be lost; call it after zero_grad()")
    with agreement(runtime.comm, "restage", "give every rank the same stage") as compared:
        compared.append(strategy.name)
        for shard in (shard for group in runtime.groups() for shard in group.shards):
            for holder in holders:
                describe(flat(holder.state.get(shard, {})))
    for unit in runtime.all_units():
        for index, old in enumerate(unit.groups):
            states = [states_by_slot(old, holder) for holder in holders]
            for holder in holders:
                for shard in old.shards:
                    holder.state.pop(shard, None)
            unit.groups[index] = new = old.restaged(strategy)
            for piece, shard in zip(new.params.pieces, new.shards, strict=True):
                slot = new.params.layout.slots[piece.slot]
                for holder, by_slot in zip(holders, states, strict=True):
                    if piece.slot in by_slot:
                        holder.state[shard] = nested(cut(by_slot[piece.slot], piece, slot, new.params.layout.block))
    runtime.apply_strategy(strategy)
    runtime.note_step()
    runtime.laid_out_anew(runtime.groups())
