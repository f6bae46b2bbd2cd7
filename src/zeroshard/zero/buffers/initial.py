"""The values that a flat buffer of weights begins with: rank 0's, or those that all ranks draw together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroshard.comm import empty_for, scope
from zeroshard.zero.buffers.layout import FlatLayout
from zeroshard.zero.buffers.partition import DrawsParts, Init
from zeroshard.zero.buffers.shards import gather_shards
from zeroshard.zero.levels import Levels


def loaded_later(name: str, param: Tensor) -> None:
    """An `Init` for weights that a checkpoint brings: nothing is drawn or sent, and they are NaN until then."""
    param.detach().fill_(float("nan") if param.is_floating_point() else 0)


def initial_values(
    name: str,
    params: Sequence[tuple[str, nn.Parameter]],
    init: Init | None,
    layout: FlatLayout,
    levels: Levels,
    *,
    shard_params: bool,
) -> Tensor:
    """``[padded_numel]`` in the parameters' own dtype. Collective.

    Args:
        name: of the buffer, for observers.
        params: with their names, in the order of the layout.
        init: what draws them; None: they are there, and rank 0's count.
        layout: where they lie.
        levels: the ranks.
        shard_params: whether weights are sharded: then what other ranks keep may be missing, and the storage may be
            resized.
    """
    numel, dtype, device = layout.padded_numel, params[0][1].dtype, params[0][1].device
    if shard_params:  # its storage will shrink and grow
        flat = torch.empty(numel, dtype=dtype, device=device)
    else:
        flat = empty_for(levels.shard, numel, dtype, device)
    layout.zero_padding(flat)
    if isinstance(init, DrawsParts):
        _draw_own(name, flat, init, layout, levels, shard_params=shard_params)
        return flat
    with torch.no_grad():
        for (param_name, param), view in zip(params, layout.views(flat), strict=True):
            if init is None:
                view.copy_(param)
            elif init is loaded_later or levels.world.rank == 0:  # the others receive what it draws
                init(param_name, view)
    if init is loaded_later:
        return flat
    with scope(f"{name}/start"):
        levels.world.broadcast(flat, src=0).wait()
    return flat


def _draw_own(
    name: str, flat: Tensor, init: DrawsParts, layout: FlatLayout, levels: Levels, *, shard_params: bool
) -> None:
    """Draw this rank's shard; the first replica's is everybody's, since processors may differ in a last digit."""
    rank = levels.shard.rank
    for piece in layout.owned(rank) if levels.writes else ():
        slot = layout.slots[piece.slot]
        with torch.no_grad():
            init.part(slot.name, flat[piece.offset :][: piece.numel], piece.interval[0], slot.numel)
    with scope(f"{name}/start"):
        own = flat[slice(*layout.interval(rank))]
        levels.replicas.broadcast(own, src=0).wait()
        if not shard_params:
            gather_shards(levels.shard, layout, flat, own).wait()
