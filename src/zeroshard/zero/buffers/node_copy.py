"""A second copy of sharded weights near by: this rank's shard of them among the ranks of its own node.

At stage 3 weights are gathered twice for each micro-batch: for forward and for backward. The first gather after an
optimizer's step crosses between nodes. What it brings is the same on every rank until the next step, so each rank keeps
``1 / secondary_shard_size`` of it, as it came: in the dtype that computes, or, where weights travel in a wire format,
as packed codes and scales. Whoever needs the weights again before that step gathers them from the node's own ranks:
backward, recomputation, the next micro-batch's forward. Of N elements of the model that takes ``N c`` bytes, packed
``W q(S)``, over ``secondary_shard_size`` of each rank. Frozen weights cross between nodes once.

Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.2: hpZ.

[Note: Kept once it is there]
    The copy is taken from weights whose gather has been waited for, never from those that are under way. Whether there
    is one is the same on every rank: it begins with a gather and ends with a step, and both are collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work
from zeroshard.wire_formats import Format
from zeroshard.zero.buffers.layout import FlatLayout


class NodeCopy:
    """This rank's part of what a gather brings, among the ranks of its node.

    Args:
        comm: the node's ranks; None: there is no second copy.
        device, dtype, numel: of what is gathered: unsharded weights, or the packed bytes of all of them.

    Attributes:
        shard: ``[n / node size]``; empty where there is no copy.
        current: whether it holds what the next gather between nodes would bring.
    """

    def __init__(self, comm: Communicator | None, device: torch.device, dtype: torch.dtype, numel: int) -> None:
        self._comm = comm
        self.shard = torch.empty(0 if comm is None else numel // comm.world_size, dtype=dtype, device=device)
        self.current = False

    @classmethod
    def of(cls, comm: Communicator | None, full: Tensor, layout: FlatLayout, wire: Format | None) -> NodeCopy:
        """For the gathers of ``full [layout.padded_numel]``, which travels in ``wire``, or as it is."""
        if wire is None:
            return cls(comm, full.device, full.dtype, full.numel())
        return cls(comm, full.device, torch.uint8, layout.world_size * wire.num_bytes(layout.shard_numel))

    def keep(self, whole: Tensor) -> bool:
        """Take this rank's part of ``whole [n]``, which has arrived, if it is not here: whether it was taken.

        [Note: Kept once it is there]
        """
        if self._comm is None or self.current:
            return False
        start = self._comm.rank * self.shard.numel()
        self.shard.copy_(whole[start : start + self.shard.numel()])
        self.current = True
        return True

    def gather(self, whole: Tensor) -> Work:
        """Issue the gather of ``whole [n]`` from the node's own ranks."""
        assert self._comm is not None
        return self._comm.all_gather(whole, self.shard)
