"""Norms, from partial norms of shards, with the same bits on each rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeroshard.comm import CONTROL, Communicator, labelled


def norm_of(flat: Tensor, norm_type: float) -> Tensor:
    """`torch.linalg.vector_norm`, computed in fp32 for a bfloat16 tensor: bfloat16 keeps only two digits."""
    flat = flat if flat.numel() else flat.new_zeros(1)  # no element has no maximum
    return torch.linalg.vector_norm(flat, norm_type, dtype=torch.float32 if flat.dtype == torch.bfloat16 else None)


def norm_of_partials(partials: Tensor, comm: Communicator | None, norm_type: float) -> Tensor:
    """The norm from float64 partials ``[n]``, or k norms from ``[n, k]``; with ``comm``, each of its ranks has n."""
    if comm is not None:
        rows = partials.new_empty(comm.world_size * len(partials), *partials.shape[1:])
        with labelled(CONTROL):
            comm.all_gather(rows.view(-1), partials.reshape(-1)).wait()
        partials = rows
    return partials.amax(0) if math.isinf(norm_type) else sum(partials[1:], partials[0]) ** (1.0 / norm_type)
