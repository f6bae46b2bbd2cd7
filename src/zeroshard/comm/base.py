"""The interface between the engine and the network: `Communicator`, with five collectives, and `Work`, their handle.

Everything that moves bytes between ranks implements `Communicator`. Behaviour (observing, throttling) is added by
wrappers, and the engine does not know which implementation it uses. Every implementation keeps these rules, and
`tests/comm/test_contract.py` checks them:

* Output first, as in torch. All ranks issue the same operations in the same order; several may be in flight.
* An operation may run asynchronously. The caller must not touch its tensors until `Work.wait()` has returned; on CUDA
  ``wait`` orders the current stream after the operation and does not block the host.
* A collective only reads its input, as in torch. In place, `reduce_scatter`'s output is this rank's slice of the input,
  whose other slices are then undefined, and `all_gather`'s input is this rank's slice of the output. The engine's flat
  buffers are reduced and gathered so. An input that overlaps the output otherwise is copied first.
* The result of a reduction has the same bits on every rank, and from run to run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

ReduceOp = Literal["sum", "max", "min", "product"]
Groups = Sequence[Sequence[int]]


class PeerError(RuntimeError):
    """Another rank failed, is lost, or issued another operation, so that this rank cannot continue."""


def is_of_peers(error: BaseException) -> bool:
    """Return whether ``error``, raised by torch's own collectives or stores, says that a rank is gone or never came.

    gloo raises plain RuntimeErrors whose messages begin with a file name of its source.
    """
    gloo = isinstance(error, RuntimeError) and re.search(r"gloo/|\[gloo\]|Gloo |by peer|Broken pipe", str(error))
    return bool(gloo) or isinstance(error, dist.DistError)


class Work(Protocol):
    """An operation that may still be running."""

    def wait(self) -> None:
        """Order the caller (on CUDA: its current stream) after the operation; raise what went wrong in it."""


class Done:
    """The handle of an operation that had finished when it was returned."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()


class AllOf:
    """The handle of several operations."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()


@runtime_checkable
class Communicator(Protocol):
    """Collectives among ``world_size`` ranks; see the module's docstring for the rules.

    Five more members are used if a communicator has them:

    * ``empty(numel, dtype) -> Tensor``: CPU memory that its collectives access without a copy. See `empty_for`.
    * ``buffer_bytes: int``: bytes of its own buffers on this rank, with those of its parts. See `buffer_bytes`.
    * ``split(groups) -> Communicator``: a communicator of some of the ranks. Call the function `split`.
    * ``all_to_all(output, input) -> Work``: what wire formats are sent by. Call the function `all_to_all`.
    * ``reduce_scatter_consuming(output, input, op) -> Work``: `reduce_scatter` without the copy that keeps the input
      intact. Call the function `reduce_scatter_consuming`.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks take part."""

    @property
    def uniform_order(self) -> bool:
        """Whether `all_reduce` adds in the same order as `reduce_scatter`, so that both give the same bits."""

    @property
    def control_device(self) -> torch.device:
        """The device for tensors of small control messages: the CPU if this communicator can send CPU tensors."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``tensor`` (any shape, contiguous) over all ranks, in place."""

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """``output [n]`` becomes this rank's slice of the reduction of ``input [world_size * n]``.

        ``input`` keeps its values, unless ``output`` is this rank's slice of it: the other slices are then undefined.
        """

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """``output [world_size * n]`` becomes every rank's ``input [n]``, in the order of ranks."""

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """``tensor`` becomes rank ``src``'s, in place."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


def empty_for(comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor ``[numel]`` on ``device``, in memory that ``comm`` accesses fastest."""
    own: Callable[[int, torch.dtype], Tensor] | None = getattr(comm, "empty", None)
    if own is not None and device.type == "cpu":
        return own(numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device)


def buffer_bytes(comm: Any) -> int:
    """Bytes that ``comm``, or the communicator that it wraps, has allocated on this rank; 0 if unknown."""
    while comm is not None:
        if hasattr(comm, "buffer_bytes"):
            return comm.buffer_bytes
        comm = getattr(comm, "inner", None)
    return 0


def reduce_scatter_consuming(comm: Communicator, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
    """`Communicator.reduce_scatter` of an ``input`` that nobody reads afterwards: its values are undefined.

    Some communicators add up in their input, and copy it first where it must keep its values. This spares the copy.
    """
    own = _variant(comm, "reduce_scatter_consuming", "reduce_scatter")
    return comm.reduce_scatter(output, input, op) if own is None else own(output, input, op)


def _variant(comm: Any, name: str, of: str) -> Callable[..., Work] | None:
    """The communicator's own method ``name``, if it has one that belongs to its method ``of``."""
    for namespace in (getattr(comm, "__dict__", {}), *map(vars, type(comm).__mro__)):
        if name in namespace:
            return getattr(comm, name)
        if of in namespace:
            return None  # a subclass's own method, which the caller expects to be called
    return None


def is_own_slice(output: Tensor, input: Tensor, rank: int) -> bool:
    """Whether ``output [n]`` is rank ``rank``'s slice of ``input [world_size * n]``, in the same memory."""
    if output.numel() == 0 or not (input.is_contiguous() and output.is_contiguous()):
        return False
    return output.data_ptr() == input.data_ptr() + rank * output.numel() * input.element_size()


def overlaps(one: Tensor, other: Tensor) -> bool:
    """Whether the memory that two tensors span has bytes in common."""
    if one.is_meta or other.is_meta or not one.numel() or not other.numel():
        return False
    (start, stop), (begin, end) = (_span(tensor) for tensor in (one, other))
    return start < end and begin < stop


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one after its last."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def kept_apart(input: Tensor, output: Tensor, *, in_place: bool) -> Tensor:
    """``input``, or a copy if writing to ``output`` changes it. ``in_place``: the operation allows for this overlap."""
    return input.clone() if overlaps(input, output) and not in_place else input


def all_to_all(comm: Communicator, output: Tensor, input: Tensor) -> Work:
    """Part r of ``output`` becomes the part of rank r's ``input`` that is for this rank. Collective.

    Args:
        comm: among whom.
        output: ``[world_size * n]``, in other memory than ``input``.
        input: ``[world_size * n]``: part r is for rank r. It is only read.

    Raises:
        ValueError: the tensors are something else, or this kind of communicator has no such collective.
    """
    own: Callable[[Tensor, Tensor], Work] | None = getattr(comm, "all_to_all", None)
    if own is None:
        what = "gradients cannot travel in a wire format"
        raise ValueError(f"comm: {what} over a {type(comm).__name__}; give it a method all_to_all(output, input)")
    return own(output, input)


def split(comm: Communicator, groups: Groups, *, anew: bool = False) -> Communicator:
    """The part of ``comm`` that this rank is in. Collective.

    Operations of a part are independent of those of ``comm`` and of other parts. It is closed with ``comm``.

    Args:
        comm: the whole world.
        groups: the ranks of each part, in ascending order; together each rank once. The same on every rank.
        anew: whether a single part is a communicator of its own too; else it is ``comm`` itself.

    Raises:
        ValueError: ``groups`` are something else, or this kind of communicator has no parts.
    """
    if any(list(ranks) != sorted(ranks) for ranks in groups) or not all(groups):
        raise ValueError(f"groups: {groups} are not lists of ascending ranks; name at least one rank in each")
    if sorted(rank for ranks in groups for rank in ranks) != list(range(comm.world_size)):
        raise ValueError(f"groups: {groups} do not share out a world of {comm.world_size}; name each rank once")
    if len(groups) == 1 and not anew:
        return comm
    own: Callable[[Groups], Communicator] | None = getattr(comm, "split", None)
    if own is None:
        raise ValueError(f"groups: a {type(comm).__name__} cannot be split; give it a method split(groups)")
    return own(groups)


def own_group(groups: Groups, rank: int) -> tuple[int, list[int]]:
    """The index of the group that ``rank`` is in, and its ranks."""
    return next((index, list(ranks)) for index, ranks in enumerate(groups) if rank in ranks)


_REDUCTIONS = get_args(ReduceOp)


def check_op(op: str) -> None:
    """Raise ValueError for a reduction that is not one of `ReduceOp`."""
    if op not in _REDUCTIONS:
        raise ValueError(f"op: {op!r} is not a reduction; choose one of {', '.join(_REDUCTIONS)}")


def check_shards(unsharded: Tensor, shard: Tensor, world_size: int) -> None:
    """Raise ValueError unless ``unsharded`` holds ``world_size`` tensors like ``shard``."""
    if unsharded.dtype != shard.dtype:
        raise ValueError(f"dtype: {unsharded.dtype} and {shard.dtype} differ; a collective takes tensors of one dtype")
    if unsharded.numel() != world_size * shard.numel():
        raise ValueError(
            f"numel: {unsharded.numel()} elements are not {world_size} shards of {shard.numel()}; pad the tensor"
        )


def fill(output: Tensor, flat: Tensor) -> None:
    """``output``, of any shape and strides, becomes the elements of ``flat`` in order."""
    output.detach().copy_(flat.reshape(output.shape))


def check_parts(output: Tensor, input: Tensor, world_size: int) -> None:
    """Raise ValueError unless both tensors hold ``world_size`` equal parts, alike and in different memory."""
    if output.dtype != input.dtype:
        raise ValueError(f"dtype: {output.dtype} and {input.dtype} differ; a collective takes tensors of one dtype")
    if output.numel() != input.numel() or input.numel() % world_size:
        what = f"{input.numel()} elements to {output.numel()} are not {world_size} parts each"
        raise ValueError(f"numel: {what}; give both {world_size} parts of one length")
    if overlaps(output, input):
        raise ValueError("output: it shares memory with the input; an all-to-all needs a second tensor")


def check_rank(rank: int, world_size: int) -> None:
    """Raise ValueError for a rank outside the world."""
    if not 0 <= rank < world_size:
        raise ValueError(f"src: rank {rank} is outside a world of {world_size}; ranks count from 0")
