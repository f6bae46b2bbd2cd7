"""Collectives of `torch.distributed`: gloo for CPU tensors, NCCL for CUDA tensors.

Two facts about gloo shape this file. First, gloo implements reduce-scatter as an all-reduce of a copy, followed by two
more copies. We run the same all-reduce in the input itself where it may be overwritten, else in one copy: the same
bits, with fewer copies. Second, gloo moves only some dtypes, so gathers and broadcasts travel as bytes.

[Note: Messages of the host]
    The ranks' control messages decide which collectives come next and which gradients the optimizer sees, so the host
    must read them before it continues. Over NCCL the host would wait there for everything queued on the device. Reading
    them a step later is not an option: a rank cannot know whether another rank used other parameters in this step, and
    would step without their gradients. gloo sends such messages from host to host, and no device waits.
    ``init_process_group("nccl")`` makes a group without a CPU backend, so the first collective on CPU tensors creates a
    gloo group of the same ranks beside it; communicators over one group share it. Only a group of all ranks gets one:
    torch names a group that only its members create after its ranks, and a second group of the same name may pick up
    the addresses of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.backends.null import LocalCommunicator
from zeroshard.comm.base import (
    DONE,
    Communicator,
    Groups,
    PeerError,
    ReduceOp,
    Work,
    check_op,
    check_parts,
    check_rank,
    check_shards,
    fill,
    is_own_slice,
    kept_apart,
    own_group,
)
from zeroshard.comm.rendezvous import default_group, joined

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# torch 2.13 renames these two; the old names still work, with a warning.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_beside: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # group without a CPU backend -> gloo group of its ranks


_NARROW = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
# gloo moves tensors of these dtypes, and does not reduce them.
_NOT_ADDED = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64, *_NARROW})


def _packed(tensor: Tensor) -> Tensor:
    """``tensor``, detached, if it is contiguous, as c10d requires; else a contiguous copy."""
    return tensor.detach().contiguous()


class _TorchWork:
    """A c10d work handle, and a ``(target, source)`` copy to make once it is done."""

    def __init__(self, handle: Any, copy: tuple[Tensor, Tensor] | None = None) -> None:
        self._handle = handle
        self._copy = copy

    def is_completed(self) -> bool:
        """Whether the operation is over, on its device too; does not block, and any thread may call it."""
        handle = self._handle
        return handle is None or handle.is_completed()

    def wait_for(self, seconds: float) -> bool:
        """Wait for the handle for ``seconds`` at most; return whether it is over, or has failed: then call `wait`.

        Over NCCL this blocks the host, which `wait` does not.
        """
        if self._handle is not None:
            try:
                self._handle.wait(timedelta(seconds=seconds))
            except RuntimeError:  # too early, or failed: then `wait` raises it again
                return self._handle.is_completed()
        return True

    def wait(self) -> None:
        """Wait for the handle once, then make the copy."""
        if self._handle is None:
            return
        try:
            self._handle.wait()
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise PeerError(
                f"a collective failed: a peer was lost or called a different collective ({cause})"
            ) from error
        self._handle = None
        if self._copy is not None:
            target, source = self._copy
            target.copy_(source)
            self._copy = None


class TorchCommunicator:
    """The ranks of a `torch.distributed` process group.

    Args:
        group: a process group that this rank belongs to; None: the default group.
        host_messages: whether a group without a CPU backend gets a gloo group beside it, created by the first
            collective on CPU tensors: [Note: Messages of the host]. False, or a group of some ranks: control messages
            are on the device, and the host waits for the device at each.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, and no launcher has started several ranks; or this rank is
            outside ``group``; at the first collective on CPU tensors: the ranks cannot connect over gloo.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, host_messages: bool = True) -> None:
        self.group = group if group is not None else default_group()
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise RuntimeError("this process is no member of the group; build the communicator on its members only")
        backends = dist.get_backend_config(self.group)
        self._host_messages = host_messages
        self._backends = backends  # as ``cuda:nccl``
        takes_all = self.world_size == dist.get_world_size()
        self._needs_beside = "cpu:" not in backends and host_messages and takes_all and dist.is_gloo_available()
        # gloo's reduce-scatter and all-reduce are one algorithm; NCCL picks its algorithm by operation and size.
        self.uniform_order = "nccl" not in backends
        has_gloo = "gloo" in backends
        self._gloo_takes_cpu = has_gloo or self._needs_beside
        self._gloo_takes_all = has_gloo and self.uniform_order
        cuda = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.control_device = torch.device("cpu") if self._gloo_takes_cpu else cuda

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self._gloo_takes_all or (self._gloo_takes_cpu and tensor.device.type == "cpu")

    def _group_for(self, tensor: Tensor) -> Any:
        """The process group that moves ``tensor``: [Note: Messages of the host]. Collective at the first CPU tensor.

        Raises:
            RuntimeError: the ranks cannot connect over gloo.
        """
        if tensor.device.type != "cpu" or not self._needs_beside:
            return self.group
        if self.group not in _beside:
            _beside[self.group] = self._made_beside()
        return _beside[self.group]

    def _made_beside(self) -> Any:
        ranks = dist.get_process_group_ranks(self.group)
        try:
            return dist.new_group(ranks, self._timeout(), "gloo")
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            what = f"a group of {self._backends} takes no CPU tensors, and its ranks cannot meet over gloo ({cause})"
            todo = "set GLOO_SOCKET_IFNAME to the network interface that they share"
            raise RuntimeError(f"{what}; {todo}, or give comm=TorchCommunicator(host_messages=False)") from error

    def _check_adds(self, tensor: Tensor) -> None:
        """Raise ValueError for a dtype that gloo moves but does not reduce."""
        if self._is_gloo(tensor) and tensor.dtype in _NOT_ADDED:
            what = f"gloo does not reduce {str(tensor.dtype).removeprefix('torch.')}"
            raise ValueError(f"dtype: {what}; convert the tensor, or use RingCommunicator, which reduces every dtype")

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce in place; asynchronous."""
        check_op(op)
        if tensor.numel() == 0 or self.world_size == 1:
            return DONE
        self._check_adds(tensor)
        packed = _packed(tensor)
        handle = dist.all_reduce(packed, _OPS[op], group=self._group_for(tensor), async_op=True)
        return _TorchWork(handle, None if packed.data_ptr() == tensor.data_ptr() else (tensor.detach(), packed))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce and keep this rank's slice; asynchronous. ``input`` stays intact, unless ``output`` is its slice."""
        return self._reduce_scatter(output, input, op, may_write=is_own_slice(output, input, self.rank))

    def reduce_scatter_consuming(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce and keep this rank's slice; asynchronous. The values of ``input`` are undefined afterwards."""
        return self._reduce_scatter(output, input, op, may_write=True)

    def _reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp, *, may_write: bool) -> Work:
        check_op(op)
        check_shards(input, output, self.world_size)
        if output.numel() == 0:
            return DONE
        self._check_adds(input)
        input = kept_apart(input, output, in_place=is_own_slice(output, input, self.rank))
        packed, given = _packed(input), output.detach()
        # gloo reduces in place, by the all-reduce below.
        reduces_here = self._is_gloo(input) and self.world_size > 1 and not may_write
        input = packed.clone() if reduces_here and packed.data_ptr() == input.data_ptr() else packed
        output = _packed(given)
        own = input.view(-1)[self.rank * output.numel() : (self.rank + 1) * output.numel()]
        in_place = own.data_ptr() == given.data_ptr()
        if not self._is_gloo(input):
            copy = None if output.data_ptr() == given.data_ptr() else (given, output)
            handle = _reduce_scatter(output, input, _OPS[op], group=self._group_for(input), async_op=True)
            return _TorchWork(handle, copy)
        handle = None
        if self.world_size > 1:
            handle = dist.all_reduce(input, _OPS[op], group=self._group_for(input), async_op=True)
        elif not in_place:
            fill(given, own)
        return _TorchWork(handle, None if in_place else (given, own.view(given.shape)))

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Gather every rank's shard, in the order of ranks; asynchronous."""
        check_shards(output, input, self.world_size)
        if input.numel() == 0:
            return DONE
        input = kept_apart(input, output, in_place=is_own_slice(input, output, self.rank))
        return self._moved(_all_gather, output, input)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Receive from every rank its part for this rank; asynchronous."""
        check_parts(output, input, self.world_size)
        if input.numel() == 0:
            return DONE
        if self.world_size == 1:
            fill(output, input)
            return DONE
        return self._moved(dist.all_to_all_single, output, input)

    def _moved(self, collective: Callable[..., Any], output: Tensor, input: Tensor) -> Work:
        """Issue a collective that moves ``input`` into ``output`` unchanged; over gloo as bytes."""
        target = _packed(output)
        copy = None if target.data_ptr() == output.data_ptr() else (output.detach(), target)
        flat, own = target.view(-1), _packed(input).view(-1)
        if self._is_gloo(input):
            flat, own = flat.view(torch.uint8), own.view(torch.uint8)
        return _TorchWork(collective(flat, own, group=self._group_for(input), async_op=True), copy)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Take rank ``src``'s tensor; asynchronous."""
        check_rank(src, self.world_size)
        if tensor.numel() == 0 or self.world_size == 1:
            return DONE
        packed = _packed(tensor)
        copy = None if packed.data_ptr() == tensor.data_ptr() else (tensor.detach(), packed)
        message = packed.view(-1).view(torch.uint8) if self._is_gloo(tensor) else packed
        return _TorchWork(dist.broadcast(message, group=self._group_for(tensor), group_src=src, async_op=True), copy)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        dist.barrier(self.group)

    def split(self, groups: Groups) -> TorchCommunicator:
        """A process group for each group of ranks, which lives as long as torch's default group.

        All ranks of a group that only its members created stay in it: torch would name a second one like the first.
        """
        named = dist.get_process_group_ranks(self.group)
        index, _ = own_group(groups, self.rank)
        # The default group can create groups with all ranks taking part; members of another group create theirs alone.
        is_world = self.group is dist.group.WORLD
        if len(groups) == 1 and not is_world:
            return TorchCommunicator(self.group, host_messages=self._host_messages)
        made: list[Any] = [
            dist.new_group(
                [named[rank] for rank in ranks],
                backend=None if is_world else dist.get_backend_config(self.group),
                timeout=self._timeout(),
                use_local_synchronization=not is_world,
            )
            for ranks in groups
        ]
        return TorchCommunicator(made[index], host_messages=self._host_messages)

    def _timeout(self) -> timedelta | None:
        """The group's timeout; None (torch's default) if this version of torch does not tell."""
        device = torch.device("cpu" if "cpu:" in self._backends else self._backends.partition(":")[0])
        group: Any = self.group
        return getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)


def communicator(
    given: Communicator | None, process_group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Communicator:
    """Return the ranks that train together, watched for ranks that diverge: `zeroshard.comm.wrappers.library_watch`.

    None stands for those of ``process_group`` or, without it, for those that a launcher has started
    (`zeroshard.comm.rendezvous.joined`; ``device`` is where the model is, None: not known), else for this process
    alone. Collective.
    """
    if given is None:
        among_several = process_group is not None or joined(device)
        given = TorchCommunicator(process_group) if among_several else LocalCommunicator()
    if given.world_size == 1 or not dist.is_initialized():
        return given
    from zeroshard.comm.wrappers import library_watch  # the library is imported without it

    return library_watch.watched(given)
