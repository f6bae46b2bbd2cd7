"""A reduce-scatter in a wire format over nodes: a sum in full precision inside each node, an exchange between nodes.

An all-to-all over all W ranks sends (W - N) / W of a buffer from each rank to other nodes, through the rank's own link.
Of N ranks in a node each sends a part of the same sum, so the node adds it up first, in the dtype that gradients
accumulate in. Then 1 / N of that crosses, M nodes being M = W / N::

    local           [M, N, n]   shard (m, i) belongs to rank i of node m
    turned          [N, M, n]   row i: what the ranks i of all nodes own
    reduce-scatter  [M, n]      inside the node: rank i has the node's sums of row i
    all-to-all      [M, q(n)]   among the ranks i of all nodes: each sends M - 1 quantised sums of n elements

Each owner adds up what arrives in fp32 in the order of nodes, its own node's sum with it, which nobody has rounded.

Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.3: qgZ, whose first exchange, inside the node, is
quantised too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work, all_to_all, empty_for
from zeroshard.wire_formats import Format
from zeroshard.zero.buffers import wire
from zeroshard.zero.levels import Nodes


def packed_reduce(
    comm: Communicator, nodes: Nodes | None, form: Format, local: Tensor, rounding: wire.Rounding
) -> wire.PackedReduce | NodeReduce:
    """The reduce-scatter of ``local`` over ``comm``; ``nodes``: over which it goes in two steps, None: in one."""
    if nodes is None:
        return wire.PackedReduce(comm, form, local, rounding)
    return NodeReduce(nodes, form, local, rounding)


class NodeReduce:
    """Two collectives, of which the second can be issued only when the first is done: [Note: Two levels].

    Args:
        nodes: of the ranks that shard together.
        form: what travels between nodes.
        local: ``[W * n]``: this rank's sum, in the order of ranks; read here.
        rounding: of this buffer.

    Attributes:
        packed: what arrives from other nodes.
        num_left: collectives that are yet to be issued.
    """

    def __init__(self, nodes: Nodes, form: Format, local: Tensor, rounding: wire.Rounding) -> None:
        self._inside, self._between = inside, between = nodes.inside, nodes.between
        self._form, self._rounding = form, rounding
        shards = local.view(between.world_size, inside.world_size, -1)  # [M, N, n]
        self._turned: Tensor | None = empty_for(inside, local.numel(), local.dtype, local.device)
        self._turned.view(inside.world_size, between.world_size, -1).copy_(shards.transpose(0, 1))
        self._own = local.new_empty(shards.shape[-1])
        # Taken here, on the stream of the first collective: on that of the second nothing waits for who reads them.
        self._sent = wire.rows_for(between, form, self._own.numel(), local.device)
        self.packed = torch.empty_like(self._sent)
        self.num_left = 2

    def issue(self) -> Work:
        """Issue the next collective, once the one before it is done."""
        self.num_left -= 1
        assert self._turned is not None
        sums = self._turned.view(self._inside.world_size, -1)[self._inside.rank]  # [M * n]
        if self.num_left:
            return self._inside.reduce_scatter(sums, self._turned)
        return self._exchange(sums.view(self._between.world_size, -1))

    def _exchange(self, sums: Tensor) -> Work:
        """Quantise the other nodes' rows of ``sums [M, n]``, and send each to its owner."""
        between = self._between
        wire.pack_rows(self._sent, sums, self._form, self._rounding.keys(between.world_size), but=between.rank)
        self._own.copy_(sums[between.rank])
        wire.read_here(sums)
        self._turned = None
        return all_to_all(between, self.packed.view(-1), self._sent.view(-1))

    def deliver(self, target: Tensor) -> None:
        """``target [n]`` becomes the sum, once both are done."""
        wire.dequantised_sum(self.packed, self._own, self._between.rank, target, self._form)
        wire.read_here(self.packed)
        wire.read_here(self._own)
