"""Initial values of a flat buffer of weights: rank 0's, or those that each rank draws for its own shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroshard.comm import empty_for, labelled
from zeroshard.zero.buffers.partition import DrawsParts, Init
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.rank_groups import RankGroups


def loaded_later(name: str, param: Tensor) -> None:
    """An `Init` for weights that a checkpoint will load: nothing is drawn or sent, and they are NaN until then."""
    param.detach().fill_(float("nan") if param.is_floating_point() else 0)


def initial_values(
    name: str,
    params: Sequence[tuple[str, nn.Parameter]],
    init: Init | None,
    layout: FlatLayout,
    rank_groups: RankGroups,
    *,
    shard_params: bool,
) -> Tensor:
    """Return the buffer with its initial values: ``[padded_numel]`` in the parameters' own dtype. Collective.

    Args:
        name: name of the buffer, for observers.
        params: the parameters with their names, in the order of the layout.
        init: function that draws the values; None: the parameters have values, and rank 0's are broadcast.
        layout: layout of the buffer.
        rank_groups: the ranks.
        shard_params: whether weights are sharded. If so, other ranks' shards may be left without values, and the
            buffer's storage can be resized.
    """
    numel, dtype, device = layout.padded_numel, params[0][1].dtype, params[0][1].device
    if shard_params:  # memory of torch's own: the storage will be resized
        flat = torch.empty(numel, dtype=dtype, device=device)
    else:
        flat = empty_for(rank_groups.shard_group, numel, dtype, device)
    layout.zero_padding(flat)
    if isinstance(init, DrawsParts):
        _draw_own(name, flat, init, layout, rank_groups, shard_params=shard_params)
        return flat
    with torch.no_grad():
        for (param_name, param), view in zip(params, layout.views(flat), strict=True):
            if init is None:
                view.copy_(param)
            elif init is loaded_later or rank_groups.world.rank == 0:  # other ranks receive rank 0's values
                init(param_name, view)
    if init is loaded_later:
        return flat
    with labelled(f"{name}/start"):
        rank_groups.world.broadcast(flat, src=0).wait()
    return flat


def _draw_own(
    name: str, flat: Tensor, init: DrawsParts, layout: FlatLayout, rank_groups: RankGroups, *, shard_params: bool
) -> None:
    """Draw this rank's shard in the first replica, and broadcast it to the others: processors may round differently."""
    rank = rank_groups.shard_group.rank
    for piece in layout.owned(rank) if rank_groups.writes else ():
        slot = layout.slots[piece.slot]
        with torch.no_grad():
            init.part(slot.name, flat[piece.offset :][: piece.numel], piece.interval[0], slot.numel)
    with labelled(f"{name}/start"):
        own = flat[slice(*layout.interval(rank))]
        rank_groups.replicate_group.broadcast(own, src=0).wait()
        if not shard_params:
            layout.gather(rank_groups.shard_group, flat, own).wait()
