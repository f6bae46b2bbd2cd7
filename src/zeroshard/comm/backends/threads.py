"""N ranks as N threads of one process: the whole engine in a debugger, a notebook or a unit test.

In a collective each rank puts a reference to its tensor into a shared table and waits at a barrier. Then it reads what
it needs from the others' tensors and waits at the barrier again; only after that may a rank change its tensor. Sums run
in the order of ranks, ``((x0 + x1) + x2) + ...``, so `all_reduce` and `reduce_scatter` give the same bits.

The last rank at the barrier checks that all made the same call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from zeroshard.comm.base import DONE, Groups, PeerError, ReduceOp, Work, own_group
from zeroshard.comm.flat import FlatCommunicator
from zeroshard.comm.labels import current_label
from zeroshard.comm.queued.worker import Operation
from zeroshard.comm.reductions import COMBINE

T = TypeVar("T")


class _Table:
    """The table and the barrier that the ranks of one world share.

    Attributes:
        tensors: each rank's tensor.
        calls: each rank's call: operation and arguments; empty when a collective is over.
        differing: all calls if they are not the same, else empty.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.tensors: list[Tensor | None] = [None] * world_size
        self.calls: list[tuple[object, ...]] = [()] * world_size
        self.differing: list[tuple[object, ...]] = []
        self.barrier = threading.Barrier(world_size, action=self._all_are_here, timeout=timeout_s)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], _Table] = {}

    def part(self, key: tuple[int, int], world_size: int) -> _Table:
        """The table of a part of the ranks; all ranks that pass the same key get the same table."""
        with self._lock:
            if key not in self._parts:
                self._parts[key] = _Table(world_size, self._timeout_s)
                if self.barrier.broken:
                    self._parts[key].abort()
            return self._parts[key]

    def _all_are_here(self) -> None:
        """The barrier's action: runs on one thread while the others wait."""
        first = next((call for call in self.calls if call), None)
        if first is not None:  # not a barrier, nor the end of a call
            self.differing = [] if all(call == first for call in self.calls) else list(self.calls)

    def abort(self) -> None:
        """Make every collective here, and in parts of this world, raise from now on."""
        with self._lock:
            self.barrier.abort()
            for part in self._parts.values():
                part.abort()

    def meet(self) -> None:
        """Wait for all ranks.

        Raises:
            PeerError: a rank failed, or did not come in time.
        """
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerError("a peer rank failed or did not come to the collective in time") from None


def _finish(tensor: Tensor) -> None:
    """On a GPU, wait for the current stream: each rank queues its work on its own streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _reduced(pieces: list[Tensor], op: str) -> Tensor:
    total = pieces[0].clone()
    for piece in pieces[1:]:
        COMBINE[op](total, piece, out=total)
    return total


class ThreadCommunicator(FlatCommunicator):
    """One rank of a world of threads; made by `run_threads`. Every operation is done on return."""

    def __init__(self, rank: int, world_size: int, table: _Table) -> None:
        self.rank = rank
        self.world_size = world_size
        self._table = table
        self._num_splits = 0
        self._call: tuple[object, ...] = ()

    def split(self, groups: Groups) -> ThreadCommunicator:
        """Return the communicator of this rank's group, which has its own table."""
        self._call = ("split", [list(ranks) for ranks in groups])
        self._exchange(torch.empty(0))
        self._leave()
        index, ranks = own_group(groups, self.rank)
        table = self._table.part((self._num_splits, index), len(ranks))
        self._num_splits += 1
        return ThreadCommunicator(ranks.index(self.rank), len(ranks), table)

    def _submit(self, op: str, operation: Operation, *tensors: Tensor) -> Work:
        # with the label, for tensors of one size would pass for each other
        self._call = (op, *((each.numel(), each.dtype) for each in tensors[:1]), current_label())
        operation()
        return DONE

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor; raise on every rank if they did not all make the same call."""
        table, call = self._table, self._call
        _finish(tensor)
        table.tensors[self.rank], table.calls[self.rank] = tensor, call
        table.meet()
        for rank, other in enumerate(table.differing):
            if other != call:
                raise RuntimeError(f"ranks diverged: rank {self.rank} called {call}, rank {rank} called {other}")
        return [x for x in table.tensors if x is not None]

    def _leave(self) -> None:
        own = self._table.tensors[self.rank]
        if own is not None:
            _finish(own)
        self._table.calls[self.rank] = ()
        self._table.meet()
        self._table.tensors[self.rank] = None

    def _all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        total = _reduced(self._exchange(flat), op)
        self._leave()
        flat.copy_(total)

    def _reduce_scatter(self, unsharded: Tensor, op: ReduceOp, shard: Tensor) -> None:
        pieces = self._exchange(unsharded)
        total = _reduced([piece.view(self.world_size, -1)[self.rank] for piece in pieces], op)
        self._leave()
        shard.copy_(total)

    def _all_gather(self, unsharded: Tensor, shard: Tensor) -> None:
        for row, piece in zip(unsharded.view(self.world_size, -1), self._exchange(shard), strict=True):
            if row.data_ptr() != piece.data_ptr():
                row.copy_(piece)
        self._leave()

    def _all_to_all(self, output: Tensor, parts: Tensor) -> None:
        for row, theirs in zip(output.view(self.world_size, -1), self._exchange(parts), strict=True):
            row.copy_(theirs.view(self.world_size, -1)[self.rank])
        self._leave()

    def _broadcast(self, flat: Tensor, src: int) -> None:
        pieces = self._exchange(flat)
        if self.rank != src:
            flat.copy_(pieces[src])
        self._leave()

    def _barrier(self) -> None:
        self._table.meet()


# torch's flags that a dispatch mode is active. They belong to the process and not to a thread; the last one is mirrored
# in C++. Not every version of torch has all of them.
_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


@contextmanager
def _mode_flags_kept() -> Generator[None]:
    """Restore torch's flags of active dispatch modes after threads have used modes.

    A mode saves the flag when it is entered and restores it when it is left. If thread 0 enters, thread 1 enters, 0
    leaves and 1 leaves, the flag stays set for good, and `torch.compile` compiles nothing.
    """
    before = {name: getattr(_python_dispatch, name) for name in _MODE_FLAGS if hasattr(_python_dispatch, name)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(_python_dispatch, name, value)
        tell = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
        if tell is not None:
            tell(before[_MODE_FLAGS[-1]])


def run_threads(fn: Callable[[ThreadCommunicator], T], world_size: int, *, timeout_s: float = 120.0) -> list[T]:
    """Run ``fn(comm)`` on ``world_size`` thread ranks and return their results by rank.

    Args:
        fn: the function of each rank. Ranks share the process, with its random generators and default dtype. Two
            threads that set a generator's state at once may deadlock in torch, so pass ``preserve_rng_state=False`` to
            activation checkpointing.
        world_size: the number of ranks, at least 1.
        timeout_s: seconds that a rank waits in a collective for its peers before it raises.

    Raises:
        ValueError: ``world_size`` below 1.
        BaseException: the exception of the first rank that failed; the other ranks raise at their next collective.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    table = _Table(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size

    def rank_main(rank: int) -> None:
        try:
            results[rank] = fn(ThreadCommunicator(rank, world_size, table))
        except BaseException as error:  # noqa: BLE001 -- handed to the caller below, whatever it is
            errors[rank] = error
            table.abort()

    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank{r}") for r in range(world_size)]
    with _mode_flags_kept():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    failed = [error for error in errors if error is not None]
    causes = [error for error in failed if not isinstance(error, PeerError)]
    if failed:
        raise (causes or failed)[0]
    return results
