"""Point-to-point messages between ranks: the interface through which the ring uses a network.

A transport moves bytes from one rank's tensor into another's, and guarantees only this: messages from one rank to
another arrive complete and in the order in which they were sent, and neither side's tensor may be touched until its
handle has been waited on. Each message has a topic. A receiver never takes a message of another topic for the one that
it expects: it waits, or fails. `zeroshard.comm.ring.sockets` is one over TCP connections.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Groups, Work
from zeroshard.comm.rendezvous import default_group

CPU = torch.device("cpu")
_num_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Transport(Protocol):
    """Messages between ``world_size`` ranks; see the module's docstring for its guarantees."""

    topic: int  # topic of the messages that are sent and received from now on, below 2 ** 31

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def send(self, message: Tensor, to: int) -> Work:
        """Send ``message`` (contiguous, not empty) to rank ``to``; after `Work.wait` it may be changed."""

    def recv(self, buffer: Tensor, source: int) -> Work:
        """Receive from rank ``source`` into ``buffer`` (contiguous, as large as the message); filled after `Work.wait`.

        The caller must wait for receives from one rank in the order in which it posted them.
        """

    def split(self, groups: Groups) -> Transport:
        """Return a transport among the ranks of this rank's group; see `zeroshard.comm.base.split`."""

    def close(self) -> None:
        """Close the connections; messages in flight are lost."""


def members(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, int, int]:
    """Return the group itself (the default one for None), this process's rank in it, and its size.

    Raises:
        RuntimeError: there is no default group, and no launcher to make it for, or this process is no member.
    """
    parent = group if group is not None else default_group(CPU)
    rank = dist.get_rank(parent)
    if rank < 0:
        raise RuntimeError("this process is no member of the group; build the communicator on its members only")
    return parent, rank, dist.get_world_size(parent)


def own_store(parent: dist.ProcessGroup) -> dist.Store:
    """Return a store under a new prefix of the group's store. All members must call it, but none waits for another."""
    # members make their communicators in the same order, so the number is the same on all of them
    number = _num_stores.get(parent, 0)
    _num_stores[parent] = number + 1
    return dist.PrefixStore(f"zeroshard/{number}", parent.get_group_store())


def require_cpu(who: str, *tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is not on the CPU, or whose operations a subclass runs itself."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"device: {who} moves CPU tensors, not {tensor.device}'s; use TorchCommunicator for those")
        kind = type(tensor)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # the worker would wait for collectives of it
            raise ValueError(f"{kind.__name__}: {who} moves plain tensors; give it this one's full_tensor(), or a copy")
