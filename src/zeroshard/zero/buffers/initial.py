"""Initial values of a flat buffer of weights that a function draws: for all ranks, or for each rank's own shard."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import labelled
from zeroshard.zero.core.weights import Weights, broadcast_values
from zeroshard.zero.meta_models import DrawsParts, Init, loaded_later


def initial_values(weights: Weights, flat: Tensor, init: Init | None, dtype: torch.dtype) -> Tensor:
    """Return ``flat [padded_numel]`` with its initial values, in ``dtype``. Collective.

    If weights are sharded, other ranks' shards may be left without values.

    Args:
        weights: the weights that are being made.
        flat: an uninitialised buffer in the parameters' own dtype.
        init: function that draws the values; None: the parameters have values, and rank 0's are broadcast.
        dtype: the dtype of the master weights.
    """
    if init is None:
        broadcast_values(weights, flat)
    elif isinstance(init, DrawsParts):
        _draw_own(weights, flat, init)
    else:
        _draw(weights, flat, init)
    return flat.to(dtype)


def _draw(weights: Weights, flat: Tensor, init: Init) -> None:
    """Draw all values on rank 0, and broadcast them; those that are `loaded_later` are filled on each rank."""
    world = weights.rank_groups.world
    if init is loaded_later or world.rank == 0:
        with torch.no_grad():
            for slot, view in zip(weights.layout.slots, weights.layout.views(flat), strict=True):
                init(slot.name, view)
    if init is not loaded_later:
        with labelled(f"{weights.name}/start"):
            world.broadcast(flat, src=0).wait()


def _draw_own(weights: Weights, flat: Tensor, init: DrawsParts) -> None:
    """Draw this rank's shard in the first replica, and broadcast it to the others: processors may round differently."""
    layout, comm, rank_groups = weights.layout, weights.comm, weights.rank_groups
    for piece in layout.owned(comm.rank) if rank_groups.writes else ():
        slot = layout.slots[piece.slot]
        with torch.no_grad():
            init.part(slot.name, flat[piece.offset :][: piece.numel], piece.interval[0], slot.numel)
    with labelled(f"{weights.name}/start"):
        own = flat[slice(*layout.interval(comm.rank))]
        rank_groups.replicate_group.broadcast(own, src=0).wait()
        if not weights.shard_params:
            layout.gather(comm, flat, own).wait()
