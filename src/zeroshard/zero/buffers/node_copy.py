"""A second copy of sharded weights, sharded over the ranks of one node: later gathers of a step stay inside the node.

At stage 3 weights are gathered twice for each micro-batch: for forward and for backward. The first gather after an
optimizer step crosses between nodes. Its result is the same on every rank until the next step, so each rank keeps
``1 / secondary_shard_size`` of it, as it arrived: in the compute dtype, or, with a wire format, as packed codes and
scales. Later gathers before that step (for backward, recomputation, the next micro-batch's forward) use only the ranks
of the node. The copy takes ``N c / secondary_shard_size`` bytes on each rank, for N elements of c bytes, or, packed,
``W q(S) / secondary_shard_size``, for W shards of q(S) bytes. Frozen weights cross between nodes once.

Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.2: hpZ.

[Note: Kept once it is there]
    The copy is taken from weights whose gather has been waited for, never from those in flight. All ranks have a copy
    or none has: it begins with a gather and ends with a step, and both are collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work
from zeroshard.wire_formats import Format
from zeroshard.zero.buffers.layout import FlatLayout


class NodeCopy:
    """This rank's shard of the second copy, among the ranks of its node.

    Args:
        comm: the node's ranks; None: there is no second copy.
        device, dtype, numel: device, dtype and n of a gather's result: unsharded weights, or all of them as packed
            bytes.

    Attributes:
        shard: ``[n / node size]``; empty without a second copy.
        current: whether the copy is up to date, so that no gather need cross between nodes.
    """

    def __init__(self, comm: Communicator | None, device: torch.device, dtype: torch.dtype, numel: int) -> None:
        self._comm = comm
        self.shard = torch.empty(0 if comm is None else numel // comm.world_size, dtype=dtype, device=device)
        self.current = False

    @classmethod
    def of(cls, comm: Communicator | None, full: Tensor, layout: FlatLayout, wire: Format | None) -> NodeCopy:
        """Return the copy for gathers of ``full [layout.padded_numel]`` in the format ``wire``; None: as it is."""
        if wire is None:
            return cls(comm, full.device, full.dtype, full.numel())
        return cls(comm, full.device, torch.uint8, layout.world_size * wire.num_bytes(layout.shard_numel))

    def keep(self, whole: Tensor) -> bool:
        """Copy this rank's part of ``whole [n]``, a gather's result, unless the copy is current; return if it did.

        [Note: Kept once it is there]
        """
        if self._comm is None or self.current:
            return False
        start = self._comm.rank * self.shard.numel()
        self.shard.copy_(whole[start : start + self.shard.numel()])
        self.current = True
        return True

    def gather(self, whole: Tensor) -> Work:
        """Issue the all-gather of ``whole [n]`` among the node's ranks."""
        assert self._comm is not None
        return self._comm.all_gather(whole, self.shard)
