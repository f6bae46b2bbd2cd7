"""Small messages among all ranks in ceil(log2 W) rounds, where a ring would take W - 1 or twice as many.

Most collectives of a training step are small: which parameters had gradients, the mean loss, who wants to stop. Their
time is the number of rounds times the latency; bytes do not matter. A rank that has the rows of n ranks (its own, and
those of the n - 1 ranks to its right) receives n more in the next round, from the rank n places to its right (Bruck et
al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997). In the end each
rank has the rows of all, and reduces them by itself, in the ring's order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from zeroshard.comm.base import ReduceOp
from zeroshard.comm.queued.messages import Transport
from zeroshard.comm.reductions import COMBINE, as_indexable

MOST_BYTES = 16 << 10  # received by a rank in all; above this the bytes cost more than fewer rounds save


def is_small(num_bytes: int, world_size: int) -> bool:
    """Whether ``num_bytes`` from each rank are few enough for `gather_rows`."""
    return num_bytes * world_size <= MOST_BYTES


def gather_rows(own: Tensor, transport: Transport) -> Tensor:
    """Gather every rank's ``own [n]`` as ``[W, n]``; row r is rank r's."""
    rank, world_size = transport.rank, transport.world_size
    known = own.new_empty(world_size, own.numel())  # row i: from the rank i places to the right
    known[0] = own
    num_known = 1
    while num_known < world_size:
        count = min(num_known, world_size - num_known)
        heard = transport.recv(known[num_known : num_known + count], (rank + num_known) % world_size)
        told = transport.send(known[:count], (rank - num_known) % world_size)
        heard.wait()
        told.wait()
        num_known += count
    return known.roll(rank, 0)


def reduce_rows(rows: Tensor, op: ReduceOp) -> Tensor:
    """Reduce ``rows [W, n]`` to ``[n]``, each shard in the order in which the ring reduces it: the same bits."""
    world_size, numel = rows.shape
    in_order = as_indexable(rows).gather(0, _ring_order(world_size, numel)).view(rows.dtype)
    total = in_order[0]
    for row in in_order[1:]:
        COMBINE[op](row, total, out=total)
    return total


@cache
def _ring_order(world_size: int, numel: int) -> Tensor:
    """``[W, n]``: row i names, for each element, the rank whose value is added i-th.

    The sum of shard s starts at rank s + 1 and ends at its owner, rank s.
    """
    shard = torch.arange(numel) // -(-numel // world_size)
    return (shard + 1 + torch.arange(world_size)[:, None]) % world_size


def broadcast(flat: Tensor, src: int, transport: Transport) -> None:
    """Copy rank ``src``'s ``flat`` into every rank's, down a binomial tree."""
    world_size = transport.world_size
    place = (transport.rank - src) % world_size
    reached = 1
    while reached <= place:
        reached *= 2
    if place:
        transport.recv(flat, (transport.rank - reached // 2) % world_size).wait()
    told = []
    while place + reached < world_size:
        told.append(transport.send(flat, (transport.rank + reached) % world_size))
        reached *= 2
    for work in told:
        work.wait()
