"""A reduce-scatter over nodes in a wire format: unquantised sums inside each node, a quantised exchange between nodes.

In an all-to-all over all W ranks, each rank sends (W - N) / W of its buffer to other nodes, through its own link. But
the N ranks of a node send terms of the same sum. So each node first adds them up, in the dtype in which gradients
accumulate, and only 1 / N of the bytes crosses between the M = W / N nodes::

    local           [M, N, n]   shard (m, i) belongs to rank i of node m
    turned          [N, M, n]   row i: the shards that the ranks i of all nodes own
    reduce-scatter  [M, n]      inside the node: rank i gets the node's sums of row i
    all-to-all      [M, q(n)]   among the ranks i of all nodes: each sends M - 1 quantised sums of n elements

Each owner adds up the sums that arrive, in fp32 and in the order of nodes, with its own node's sum, which was not
quantised.

Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.3: qgZ, whose first exchange, inside the node, is
quantised too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Work, all_to_all, empty_for
from zeroshard.settings.wire_formats import Format, Rounding
from zeroshard.zero.core.ranks import Nodes
from zeroshard.zero.transport import wire


class NodeReduce:
    """A reduce-scatter of two collectives; the second can be issued only when the first is done.

    See [Note: Several collectives] in `gradients`.

    Args:
        nodes: the nodes of the ranks that shard together.
        form: wire format between nodes.
        local: ``[W * n]``: this rank's sum, in the order of ranks; read by the constructor.
        rounding: rounding keys of this buffer.

    Attributes:
        packed: the quantised sums that arrive from other nodes.
    """

    def __init__(self, nodes: Nodes, form: Format, local: Tensor, rounding: Rounding) -> None:
        self._within, self._between = within, between = nodes.within, nodes.between
        self._form, self._rounding = form, rounding
        shards = local.view(between.world_size, within.world_size, -1)  # [M, N, n]
        self._turned: Tensor | None = empty_for(within, local.numel(), local.dtype, local.device)
        self._turned.view(within.world_size, between.world_size, -1).copy_(shards.transpose(0, 1))
        self._own = local.new_empty(shards.shape[-1])
        # Allocated here, on the first collective's stream: the second's never waits for the readers of these buffers.
        self._sent = wire.rows_for(between, form, self._own.numel(), local.device)
        self.packed = torch.empty_like(self._sent)
        self.num_left = 2

    def issue(self, target: Tensor) -> Work:
        """Issue the next collective, once the one before it is done."""
        self.num_left -= 1
        assert self._turned is not None
        sums = self._turned.view(self._within.world_size, -1)[self._within.rank]  # [M * n]
        if self.num_left:
            return self._within.reduce_scatter(sums, self._turned)
        return self._exchange(sums.view(self._between.world_size, -1))

    def _exchange(self, sums: Tensor) -> Work:
        """Quantise the rows of ``sums [M, n]`` that other nodes own, and issue the all-to-all."""
        between = self._between
        wire.pack_rows(self._sent, sums, self._form, self._rounding.keys(between.world_size), but=between.rank)
        self._own.copy_(sums[between.rank])
        wire.record_read(sums)
        self._turned = None
        return all_to_all(between, self.packed.view(-1), self._sent.view(-1))

    def deliver(self, target: Tensor) -> None:
        """Write the sum to ``target [n]``, once both collectives are done."""
        wire.dequantised_sum(self.packed, self._own, self._between.rank, target, self._form)
        wire.record_read(self.packed)
        wire.record_read(self._own)
