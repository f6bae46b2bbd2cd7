"""Collectives of `torch.distributed`: gloo for CPU tensors, NCCL for CUDA tensors.

Two facts about gloo shape this file. Its reduce-scatter is an all-reduce of a copy followed by two copies; we
make the same all-reduce in the caller's own input, which our contract allows, and so have the same bits with none of
the copies. And it moves only some dtypes, so gathers and broadcasts travel as bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import (
    DONE,
    Groups,
    PeerError,
    ReduceOp,
    Work,
    check_op,
    check_parts,
    check_rank,
    check_shards,
    own_group,
)

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# torch 2.13 renames these two; the old names stay, with a warning.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _TorchWork:
    """A c10d work handle, and a copy to make after it."""

    def __init__(self, handle: Any, copy: tuple[Tensor, Tensor] | None = None) -> None:
        self._handle = handle
        self._copy = copy

    def add_done_callback(self, ended: Callable[[float], None]) -> None:
        """Call ``ended`` when gloo is done, on a thread of its own. (NCCL's handles know it on the device alone.)"""
        if self._handle is None:
            ended(time.perf_counter())
        else:
            self._handle.get_future().add_done_callback(lambda _: ended(time.perf_counter()))

    def is_completed(self) -> bool:
        """Whether it is over, on its device where it has one; nothing waits, and any thread may ask."""
        handle = self._handle
        return handle is None or handle.is_completed()

    def wait(self) -> None:
        """Wait for the handle once, then make the copy."""
        if self._handle is None:
            return
        try:
            self._handle.wait()
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise PeerError(f"a collective failed: a peer was lost or made another call ({cause})") from error
        self._handle = None
        if self._copy is not None:
            target, source = self._copy
            target.copy_(source)
            self._copy = None


class TorchCommunicator:
    """The ranks of a `torch.distributed` process group.

    Args:
        group: a process group that this rank belongs to; None: the default group.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group() first, "
                "or use LocalCommunicator() for one process"
            )
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise RuntimeError("this process is no member of the group; build the communicator on its members only")
        backends = dist.get_backend_config(self.group)
        self._cpu_backend = "gloo" if "gloo" in backends else ""
        # gloo reduces and then scatters the same way; NCCL picks its algorithm by operation and size.
        self.uniform_order = "nccl" not in backends
        cuda = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.control_device = torch.device("cpu") if self._cpu_backend else cuda

    def _is_gloo(self, tensor: Tensor) -> bool:
        return bool(self._cpu_backend) and (tensor.device.type == "cpu" or self.uniform_order)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce in place; asynchronous."""
        check_op(op)
        if tensor.numel() == 0 or self.world_size == 1:
            return DONE
        return _TorchWork(dist.all_reduce(tensor, _OPS[op], group=self.group, async_op=True))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce and keep this rank's slice; asynchronous. Over gloo, ``input`` is overwritten."""
        check_op(op)
        check_shards(input, output, self.world_size)
        if output.numel() == 0:
            return DONE
        own = input.view(-1)[self.rank * output.numel() : (self.rank + 1) * output.numel()]
        in_place = own.data_ptr() == output.data_ptr()
        if not self._is_gloo(input):
            return _TorchWork(_reduce_scatter(output, input, _OPS[op], group=self.group, async_op=True))
        handle = None
        if self.world_size > 1:
            handle = dist.all_reduce(input, _OPS[op], group=self.group, async_op=True)
        elif not in_place:
            output.view(-1).copy_(own)
        return _TorchWork(handle, None if in_place else (output.view(-1), own))

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Gather every rank's shard; asynchronous."""
        check_shards(output, input, self.world_size)
        if input.numel() == 0:
            return DONE
        whole, shard = output.view(-1), input.view(-1)
        if self._is_gloo(input):
            whole, shard = whole.view(torch.uint8), shard.view(torch.uint8)
        return _TorchWork(_all_gather(whole, shard, group=self.group, async_op=True))

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Take every rank's part for this one; asynchronous."""
        check_parts(output, input, self.world_size)
        if input.numel() == 0:
            return DONE
        whole, parts = output.view(-1), input.view(-1)
        if self.world_size == 1:
            whole.copy_(parts)
            return DONE
        if self._is_gloo(input):
            whole, parts = whole.view(torch.uint8), parts.view(torch.uint8)
        return _TorchWork(dist.all_to_all_single(whole, parts, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Take rank ``src``'s tensor; asynchronous."""
        check_rank(src, self.world_size)
        if tensor.numel() == 0 or self.world_size == 1:
            return DONE
        message = tensor.view(-1).view(torch.uint8) if self._is_gloo(tensor) else tensor
        return _TorchWork(dist.broadcast(message, group=self.group, group_src=src, async_op=True))

    def barrier(self) -> None:
        """Return when every rank has called it."""
        dist.barrier(self.group)

    def split(self, groups: Groups) -> TorchCommunicator:
        """A process group for each group of ranks, which lives as long as torch's default group."""
        named = dist.get_process_group_ranks(self.group)
        index, _ = own_group(groups, self.rank)
        # Members of another group than the default one cannot ask the rest of the world to take part.
        whole = self.group is dist.group.WORLD
        made: list[Any] = [
            dist.new_group(
                [named[rank] for rank in ranks],
                backend=None if whole else dist.get_backend_config(self.group),
                timeout=self._timeout(),
                use_local_synchronization=not whole,
            )
            for ranks in groups
        ]
        return TorchCommunicator(made[index])

    def _timeout(self) -> timedelta | None:
        """How long the group waits for a peer; None: as torch likes, where this version does not tell."""
        device = torch.device("cpu") if self._cpu_backend else self.control_device
        group: Any = self.group
        return getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
