"""Gradient norms over shards, with the same bits at every stage.

For finite p the norm is ``(sum over ranks r of partial_r) ** (1/p)`` with ``partial_r = sum over units of
||shard r of the unit's gradients||_p ** p``; for p = inf both sums are maxima. A shard of several parts
(`FlatLayout.parts`) has a partial for each part. Partials are kept in float64 and added in the order of ranks. If
nothing is sharded, each rank computes all of them and adds them in the same order, so the result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm import CONTROL, Communicator, labelled
from zeroshard.zero.buffers.flat_grads import FlatGrads


def global_norm(
    grads: Sequence[FlatGrads],
    comm: Communicator,
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """The p-norm of all reduced gradients: 0-dim float64, the same on every rank; 0.0 without gradients. Collective.

    Args:
        grads: the gradient buffers to measure, in the same order on every rank.
        comm: the ranks that hold the shards.
        norm_type: p > 0, or inf.
        device: where the result lives.
    """
    sharded = bool(grads) and grads[0].shard_optim and comm.world_size > 1
    shards_of = [buffer.shards() for buffer in grads]
    num_partials = len(shards_of[0]) if grads else 1
    partials = torch.zeros(num_partials, dtype=torch.float64, device=device)
    for split in shards_of:
        places = [(place, shard) for place, shard in enumerate(split) if shard.numel()]
        shards = [shard for _, shard in places]
        if shards:
            norms = torch.stack([norm_of(shard, norm_type) for shard in shards]).to(partials)
            partials = _add(partials, _at(places, norms, num_partials), norm_type)
    return norms_of_partials(partials.view(-1, 1), comm if sharded else None, norm_type)[0]


def norms_of_partials(partials: Tensor, comm: Communicator | None, norm_type: float) -> Tensor:
    """Return the p-norms of k tensors, ``[k]`` float64, from their partials, which are added in the order of rows.

    Args:
        partials: ``[n, k]`` float64: for finite p the sum of the p-th powers of each part's elements, else the maximum.
        comm: the ranks that have further rows each, which are gathered in the order of ranks; None: all rows are here.
        norm_type: p > 0, or inf.
    """
    if comm is not None:
        rows = torch.empty(comm.world_size * partials.numel(), dtype=torch.float64, device=partials.device)
        with labelled(CONTROL):
            comm.all_gather(rows, partials.reshape(-1)).wait()
        partials = rows.view(-1, partials.shape[1])
    if math.isinf(norm_type):
        return partials.amax(0)
    total = partials[0]
    for row in partials[1:]:
        total = total + row
    return total ** (1.0 / norm_type)


def _at(places: Sequence[tuple[int, Tensor]], found: Tensor, num_partials: int) -> Tensor:
    """``[num_partials]``: ``found``, one value for each shard that has elements, with zeros for the other shards."""
    if len(places) == num_partials:
        return found
    spread = found.new_zeros(num_partials)
    spread[[place for place, _ in places]] = found
    return spread


def norm_of(flat: Tensor, norm_type: float) -> Tensor:
    """`torch.linalg.vector_norm`, computed in fp32 for a bfloat16 tensor: bfloat16 keeps only two digits."""
    return torch.linalg.vector_norm(flat, norm_type, dtype=torch.float32 if flat.dtype == torch.bfloat16 else None)


def _add(partials: Tensor, norms: Tensor, norm_type: float) -> Tensor:
    if math.isinf(norm_type):
        return torch.maximum(partials, norms)
    return partials + norms**norm_type


def clip_(grads: Sequence[FlatGrads], norm: Tensor, max_norm: float) -> None:
    """Scale gradients by ``max_norm / (norm + 1e-6)`` if that is below 1, as torch does; a NaN norm makes them NaN."""
    coefficient = max_norm / (norm + 1e-6)
    if coefficient.device.type == "cpu":
        if coefficient >= 1.0:
            return
        factor: Tensor | float = float(coefficient)
    else:
        factor = coefficient.clamp(max=1.0)  # reading it here would block the host until the device is done
    for buffer in grads:
        if buffer.reduced is not None:
            buffer.reduced.mul_(factor)
