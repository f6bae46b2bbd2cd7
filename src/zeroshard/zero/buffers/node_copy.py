"""A second copy of sharded weights near by: this rank's shard of them among the ranks of its own node.

At stage 3 weights are gathered twice for each micro-batch: for forward and for backward. The first gather after an
optimizer's step crosses between nodes. What it brings is the same on every rank until the next step, so each rank keeps
``1 / secondary_shard_size`` of it, in the dtype that computes; whoever needs the weights again before that step gathers
them from the node's own ranks: backward, recomputation, the next micro-batch's forward. Of N elements of the model that
takes ``N c / secondary_shard_size`` bytes of each rank. Frozen weights cross between nodes once.

Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.2: hpZ.

[Note: Kept once it is there]
    The copy is taken from weights whose gather has been waited for, never from those that are under way. Whether there
    is one is the same on every rank: it begins with a gather and ends with a step, and both are collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work


class NodeCopy:
    """This rank's shard of a buffer of weights among the ranks of its node.

    Args:
        comm: the node's ranks; None: there is no second copy.
        full: ``[padded_numel]``: the unsharded weights.

    Attributes:
        shard: ``[padded_numel / node size]`` in the dtype of ``full``; empty where there is no copy.
        current: whether it holds what the next gather between nodes would bring.
    """

    def __init__(self, comm: Communicator | None, full: Tensor) -> None:
        self._comm = comm
        self.shard = torch.empty(
            0 if comm is None else full.numel() // comm.world_size, dtype=full.dtype, device=full.device
        )
        self.current = False

    def keep(self, full: Tensor) -> bool:
        """Take this rank's part of unsharded weights that have arrived, if it is not here: whether it was taken.

        [Note: Kept once it is there]
        """
        if self._comm is None or self.current:
            return False
        start = self._comm.rank * self.shard.numel()
        self.shard.copy_(full[start : start + self.shard.numel()])
        self.current = True
        return True

    def gather(self, full: Tensor) -> Work:
        """Issue the gather of ``full`` from the node's own ranks."""
        assert self._comm is not None
        return self._comm.all_gather(full, self.shard)
