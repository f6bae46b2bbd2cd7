"""Small messages among all ranks in ceil(log2 W) rounds, where a ring would take W - 1 or twice as many.

Most collectives of a training step are small: which parameters had gradients, the mean loss, who wants to stop. They
cost what their rounds cost, not their bytes. In round k each rank hears of as many ranks as it knows already, from the
one that is so many to its right (Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems", 1997); then each has all that there is and adds it up by itself, in the ring's order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from zeroshard.comm.base import ReduceOp
from zeroshard.comm.queued.messages import Transport
from zeroshard.comm.reductions import COMBINE, as_indexable

MOST_BYTES = 16 << 10  # that a rank receives; above them bytes cost more than rounds save


def is_small(num_bytes: int, world_size: int) -> bool:
    """Whether everyone may have what every rank has: ``num_bytes`` of each."""
    return num_bytes * world_size <= MOST_BYTES


def gather_rows(own: Tensor, transport: Transport) -> Tensor:
    """``own`` [n] of every rank: [W, n], rank r's in row r."""
    rank, world_size = transport.rank, transport.world_size
    known = own.new_empty(world_size, own.numel())  # row i: of the rank that is i to the right
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
    """[W, n] -> [n], each shard in the order in which a ring reduces it: the same bits."""
    world_size, numel = rows.shape
    in_order = as_indexable(rows).gather(0, _ring_order(world_size, numel)).view(rows.dtype)
    total = in_order[0]
    for row in in_order[1:]:
        COMBINE[op](row, total, out=total)
    return total


@cache
def _ring_order(world_size: int, numel: int) -> Tensor:
    """[W, n]: which rank's element is added first, second, ...; shard s starts at rank s + 1 and ends at its owner."""
    shard = torch.arange(numel) // -(-numel // world_size)
    return (shard + 1 + torch.arange(world_size)[:, None]) % world_size


def broadcast(flat: Tensor, src: int, transport: Transport) -> None:
    """``flat`` of rank ``src`` into everyone's, down a binomial tree."""
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
