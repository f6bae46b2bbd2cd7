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

from typing import Protocol

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work
from zeroshard.comm.streams import Mark, Streams
from zeroshard.zero.buffers.flat_params import take_written
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.weights import PlainTransport, WeightTransport


class TransportOverNodes(WeightTransport, Protocol):
    """A transport over all ranks, whose result a `NodeTransport` copies as it arrives."""

    comm: Communicator
    layout: FlatLayout

    def expect(self, full: Tensor) -> None:
        """As `prepare`, for a collective to which this rank gives a shard of `arriving` itself."""

    def arriving(self, full: Tensor) -> Tensor:
        """1-D: where the shards of all ranks arrive."""

    def arriving_kind(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        """Dtype and number of elements of `arriving`; ``dtype``: the compute dtype."""


class PlainOverNodes(PlainTransport):
    """The plain transport, whose result a `NodeTransport` may copy."""

    def expect(self, full: Tensor) -> None:
        """As `prepare`, for a collective to which this rank gives a shard of `arriving` itself."""

    def arriving(self, full: Tensor) -> Tensor:
        """1-D: where the shards of all ranks arrive."""
        return full

    def arriving_kind(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        """Dtype and number of elements of `arriving`; ``dtype``: the compute dtype."""
        return dtype, self.layout.padded_numel


class NodeTransport:
    """Gathers from this node's second copy while that is current, else by another transport.

    Args:
        between: the transport over all ranks.
        node: the node's ranks.
        dtype, device: of the unsharded weights.

    Attributes:
        shard: this rank's part of the second copy, ``[n / node size]``.
        current: whether the copy is up to date, so that no gather need cross between nodes.
    """

    def __init__(
        self, between: TransportOverNodes, node: Communicator, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.comm, self.layout = between.comm, between.layout
        self._between, self._node = between, node
        self.form, self.in_flight = between.form, between.in_flight
        sent, numel = between.arriving_kind(dtype)
        self.shard = torch.empty(numel // node.world_size, dtype=sent, device=device)
        self.resident = [self.shard]
        self.current = False

    def prepare(self, full: Tensor, master: Tensor, *, changed: bool) -> None:
        """Make this rank's shard ready, unless the second copy is."""
        if self.current:
            self._between.expect(full)
        else:
            self._between.prepare(full, master, changed=changed)

    def start(self, full: Tensor) -> Work:
        """Issue the all-gather among the node's ranks if the copy is current, else the one over all ranks."""
        if self.current:
            return self._node.all_gather(self._between.arriving(full), self.shard)
        return self._between.start(full)

    def finish(self, full: Tensor) -> bool:
        """Keep this rank's part of what has arrived, unless the copy is current: [Note: Kept once it is there]."""
        kept = not self.current
        if kept:
            start = self._node.rank * self.shard.numel()
            self.shard.copy_(self._between.arriving(full)[start : start + self.shard.numel()])
            self.current = True
        return self._between.finish(full) or kept

    def copy(self, full: Tensor, master: Tensor, streams: Streams, *after: Mark) -> Work | None:
        """Copy ``master``, which is not sharded, to ``full``."""
        return self._between.copy(full, master, streams, *after)

    def invalidate(self) -> None:
        """Let the next gather cross between nodes."""
        self.current = False

    def take_written(self, master: Tensor, written: Tensor) -> None:
        """As the transport over all ranks."""
        take_written(self._between, master, written)
