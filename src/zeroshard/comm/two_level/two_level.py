"""Two-level collectives of CPU ranks on several hosts: shared memory inside each host, rings across hosts.

    host 0   rank 0  rank 1        a shard of rank h L + l is reduced among the L ranks of each host, in memory,
    host 1   rank 2  rank 3        and then along rail l: rank l of every host
               |       |
             rail 0  rail 1

A flat ring of W ranks sends (W-1)/W of a tensor over each host's link for a reduce-scatter, and as much for a gather.
Here the link carries (H-1)/H of it, on L rails at once: half of it with two hosts, each byte once. Everything else goes
through memory. (Two levels: Jia et al. 2018, https://arxiv.org/abs/1807.11205, section 3.3; "rail" is NCCL's word.)

The ranks of each host are summed first, in order, ``P_h = ((x_hL + x_hL+1) + ...)``, and then the hosts in the ring's
order, ``((P_h+1 + P_h+2) + ...) + P_h`` for a shard of a rank on host h: the same bits on every rank, from run to run,
and from `all_reduce`, which is a reduce-scatter and an all-gather. Small tensors are gathered from all ranks, and each
rank adds them up in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Groups, ReduceOp, own_group
from zeroshard.comm.queued.messages import members, own_store
from zeroshard.comm.queued.pieces import copy
from zeroshard.comm.queued.queued import QueuedCommunicator
from zeroshard.comm.reductions import COMBINE
from zeroshard.comm.ring.ring import RingCommunicator
from zeroshard.comm.ring.sockets import SocketTransport
from zeroshard.comm.shm.shm import SharedMemoryCommunicator, hosts_of_ranks
from zeroshard.errors import UserError

SMALL_BYTES = 64 << 10  # of all ranks' tensors together; below it, gathering all costs less than a round for each host


def even_hosts(hosts: Sequence[str]) -> tuple[int, int] | None:
    """``(number of hosts, ranks on each)``; None if these numbers differ, or if a host's ranks are not consecutive.

    Args:
        hosts: for each rank, the name of its host.
    """
    num_hosts = len(set(hosts))
    num_local = len(hosts) // num_hosts
    blocks = [hosts[start : start + num_local] for start in range(0, len(hosts), num_local)]
    even = len(blocks) == num_hosts and all(len(set(block)) == 1 for block in blocks)
    return (num_hosts, num_local) if even else None


def _require_even(hosts: Sequence[str]) -> tuple[int, int]:
    found = even_hosts(hosts)
    if found is None:
        numbers = {host: list(hosts).count(host) for host in dict.fromkeys(hosts)}
        what = f"two-level needs the same number of consecutive ranks on each host, and hosts have {numbers}"
        raise UserError("comm", what, "use ring")
    return found


class TwoLevelCommunicator(QueuedCommunicator):
    """CPU ranks of one or several hosts, with as many consecutive ranks on each; tensors of any dtype.

    Operations run in issue order on the communicator's own thread. Construction is collective over ``group``.

    Args:
        group: a process group that this rank belongs to; None: the default group.
        hosts: for each rank, a name for its host; None: the ranks find out. Ranks with the same name share memory.
        timeout_s: seconds without an answer from a peer after which a collective raises.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside ``group``.
        UserError: hosts have different numbers of ranks, or a host's ranks are not consecutive; a host has too little
            shared memory.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, hosts: Sequence[str] | None = None, timeout_s: float = 600.0
    ) -> None:
        parent, _, world_size = members(group)
        hosts = hosts_of_ranks(parent) if hosts is None else hosts
        _require_even(hosts)
        store, names = own_store(parent), range(world_size)
        self._join(SocketTransport(parent, timeout_s=timeout_s), store, names, hosts, timeout_s)

    def _join(
        self,
        transport: SocketTransport,
        store: dist.Store,
        names: Sequence[int],
        hosts: Sequence[str],
        timeout_s: float,
    ) -> None:
        """Connect both levels; ``transport`` joins the ranks of ``hosts``, ``names`` are for error messages."""
        self.num_hosts, self.num_local = _require_even(hosts)
        self.rank, self.world_size = transport.rank, transport.world_size
        self._host, self._local_rank = divmod(self.rank, self.num_local)
        self._names, self._hosts, self._store, self._timeout_s, self._num_splits = names, hosts, store, timeout_s, 0
        self._transport = transport
        rails = [[host * self.num_local + local for host in range(self.num_hosts)] for local in range(self.num_local)]
        self.across = RingCommunicator(transport=transport.split(rails))
        first = self._host * self.num_local
        self.local = object.__new__(SharedMemoryCommunicator)
        beside = dist.PrefixStore(f"host/{self._host}", store)
        self.local._join(beside, self._local_rank, names[first : first + self.num_local], timeout_s)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._open(f"two-level-{names[self.rank]}")

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor ``[numel]`` in memory that the ranks of this host share."""
        return self.local.empty(numel, dtype)

    def split(self, groups: Groups) -> QueuedCommunicator:
        """Two levels for each group of ranks; a ring for a group with different numbers of ranks on its hosts."""
        index, ranks = own_group(groups, self.rank)
        transport, hosts = self._transport.split(groups), [self._hosts[rank] for rank in ranks]
        store = dist.PrefixStore(f"part/{self._num_splits}/{index}", self._store)
        self._num_splits += 1
        if even_hosts(hosts) is None:
            part: QueuedCommunicator = RingCommunicator(transport=transport)
        else:
            part = object.__new__(TwoLevelCommunicator)
            part._join(transport, store, [self._names[rank] for rank in ranks], hosts, self._timeout_s)
        self._parts.add(part)
        return part

    @property
    def buffer_bytes(self) -> int:
        """Bytes of slots, of receive buffers and of the buffer between the levels, here and in each part."""
        own = self.local.buffer_bytes + self.across.buffer_bytes + self._memory.nbytes
        return own + sum(part.buffer_bytes for part in self._parts)

    def _take_up(self, topic: int) -> None:
        self.local._take_up(topic)
        self.across._take_up(topic)

    def _leave(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.local.close()
        self.across.close()
        self._transport.close()

    # -- the collectives, on the worker's thread: those of the two levels, called one after the other -------------

    def _reduce_scatter(self, whole: Tensor, op: ReduceOp, shard: Tensor) -> None:
        if self._is_small(whole, self.world_size):
            start = self.rank * shard.numel()
            shard.copy_(self._reduced(self._rows(whole), op)[start : start + shard.numel()])
        else:
            self._reduce_large(whole, op, shard)

    def _reduce_large(self, whole: Tensor, op: ReduceOp, shard: Tensor) -> None:
        """Reduce each host's shards among the ranks of this host, then this rank's row of them along the rail."""
        numel, partial = shard.numel(), self._between(shard)  # [hosts * n]
        for host in range(self.num_hosts):
            theirs = whole[host * self.num_local * numel : (host + 1) * self.num_local * numel]
            self.local._reduce_scatter(theirs, op, partial[host * numel : (host + 1) * numel])
        self.across._reduce_scatter(partial, op, shard)

    def _all_gather(self, whole: Tensor, shard: Tensor, *, others_only: bool = False) -> None:
        if self._is_small(whole):
            whole.copy_(self._rows(shard).view(-1))
            return
        numel, gathered = shard.numel(), self._between(shard)  # [hosts * n]
        self.across._all_gather(gathered, shard)
        for host in range(self.num_hosts):
            theirs = whole[host * self.num_local * numel : (host + 1) * self.num_local * numel]
            self.local._all_gather(theirs, gathered[host * numel : (host + 1) * numel])

    def _all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        if self._is_small(flat, self.world_size):
            flat.copy_(self._reduced(self._rows(flat), op))
            return
        numel = -(-flat.numel() // self.world_size)
        whole = flat
        if flat.numel() != numel * self.world_size:
            whole = flat.new_zeros(numel * self.world_size)
            whole[: flat.numel()] = flat
        own = whole[self.rank * numel : (self.rank + 1) * numel]
        self._reduce_large(whole, op, own)
        self._all_gather(whole, own)
        copy(flat, whole[: flat.numel()])

    def _all_to_all(self, whole: Tensor, parts: Tensor) -> None:
        """Send each part first to the rank of this host that is on the receiver's rail, then along that rail."""
        if not parts.numel():
            return
        by_rail = parts.view(self.num_hosts, self.num_local, -1).transpose(0, 1).reshape(-1)
        here = torch.empty_like(by_rail)
        self.local._all_to_all(here, by_rail)  # [senders of this host, hosts, n]
        by_host = here.view(self.num_local, self.num_hosts, -1).transpose(0, 1).reshape(-1)
        self.across._all_to_all(whole, by_host)

    def _broadcast(self, flat: Tensor, src: int) -> None:
        host, local = divmod(src, self.num_local)
        if not flat.numel():
            return
        if self._local_rank == local and self.num_hosts > 1:
            self.across._broadcast(flat, host)
        if self.num_local > 1:
            self.local._broadcast(flat, local)

    def _barrier(self) -> None:
        """Wait for the ranks of this host, then for those of the rail, each of which has waited for its own host."""
        self.local._barrier()
        self.across._barrier()

    def _is_small(self, tensor: Tensor, times: int = 1) -> bool:
        return tensor.nbytes * times <= SMALL_BYTES

    def _between(self, shard: Tensor) -> Tensor:
        """``[hosts * n]``: the buffer between the levels, in memory that the ranks of this host share."""
        num_bytes = self.num_hosts * shard.nbytes
        if self._memory.nbytes < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = self.local.empty(num_bytes, torch.uint8)
        return self._memory[:num_bytes].view(shard.dtype)

    def _rows(self, flat: Tensor) -> Tensor:
        """Gather every rank's ``flat [n]`` as ``[world_size, n]``, in two rounds."""
        if not flat.numel():
            return flat.new_empty(self.world_size, 0)
        rail = flat.new_empty(self.num_hosts * flat.numel())
        self.across._all_gather(rail, flat)
        rows = flat.new_empty(self.num_local * rail.numel())
        self.local._all_gather(rows, rail)
        return rows.view(self.num_local, self.num_hosts, -1).transpose(0, 1).reshape(self.world_size, flat.numel())

    def _reduced(self, rows: Tensor, op: ReduceOp) -> Tensor:
        """``[n]``: the reduction of ``rows [world_size, n]`` in the order of `_reduce_large`."""
        combine = COMBINE[op]
        sums = rows[:: self.num_local].clone()  # [hosts, n]
        for local in range(1, self.num_local):
            combine(sums, rows[local :: self.num_local], out=sums)
        result, numel = torch.empty_like(rows[0]), -(-rows.shape[1] // self.world_size) * self.num_local
        for host in range(self.num_hosts):
            theirs = slice(host * numel, (host + 1) * numel)
            total = sums[(host + 1) % self.num_hosts, theirs].clone()
            for later in range(2, self.num_hosts + 1):
                combine(total, sums[(host + later) % self.num_hosts, theirs], out=total)
            result[theirs] = total
        return result
