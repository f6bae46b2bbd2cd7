"""The cost and the memory of what torch.compile compiles, from the operations of an eager trace.

    products, attention     stay kernels of their own
    sums over rows          too, such as the gradient of a norm's weight: such a kernel reads in another order
    all else                each run of operations between two products is one kernel, which reads what comes from
                            outside of the run, and writes what something outside of it reads

What a forward computes in such a run and only a backward reads is not kept: the backward computes it again from what is
in memory. So a graph keeps for its backward what operations that are kernels of their own read or make, and what
several kernels of its forward read. Torch's partitioner looks for the least cut through the joint graph of forward and
backward, and finds the same for our blocks (a test compares them). Ansel et al. 2024, "PyTorch 2",
https://doi.org/10.1145/3620665.3640366: fusion, and what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.lab.predict.work import Work, bytes_read, tensors_of

_sum: Any = torch.ops.aten.sum
NumberOf = Callable[[Tensor], int]
Bytes = dict[tuple[int, int], int]


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of a trace."""

    work: Work  # its cost by itself
    # reads, writes: bytes of the tensors that it reads and writes, by their storage's number and the place in it
    reads: Bytes
    writes: Bytes
    sums_rows: bool = False  # whether it is a sum over all dimensions but the last
    opaque: bool = False  # whether it is a kernel of ours

    @property
    def fuses(self) -> bool:
        """Whether the compiler computes it in one kernel with its neighbours."""
        return not (self.opaque or self.work.shape or self.work.attention or self.work.flops)


def operation(
    work: Work, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, number_of: NumberOf
) -> Operation:
    """Describe a call of the operator ``func``; ``number_of`` gives the number of a tensor's storage."""
    inputs, outputs = list(tensors_of((*args, *kwargs.values()))), list(tensors_of((result,)))
    sums = func._overloadpacket is _sum and inputs[0].dim() > 1 and outputs[0].numel() == inputs[0].shape[-1]
    return Operation(work, _bytes(inputs, number_of), _bytes(outputs, number_of), sums)


def opaque(works: Sequence[Work], tensors: Iterable[Tensor], number_of: NumberOf) -> list[Operation]:
    """Describe a call of a kernel of ours that costs ``works`` and reads or writes ``tensors``."""
    first, *others = works
    return [
        Operation(first, _bytes(tensors, number_of), {}, opaque=True),
        *(Operation(w, {}, {}, opaque=True) for w in others),
    ]


def _bytes(tensors: Iterable[Tensor], number_of: NumberOf) -> Bytes:
    found: Bytes = {}
    for tensor in tensors:
        _add(found, (number_of(tensor), int(tensor.storage_offset())), bytes_read(tensor))
    return found


def _add(found: Bytes, place: tuple[int, int], num_bytes: int) -> None:
    found[place] = max(found.get(place, 0), num_bytes)


@dataclass(frozen=True)
class Region:
    """What one call of a compiled forward or backward computes, in order."""

    operations: Sequence[Operation]
    backward: bool


def fused(
    operations: Sequence[Operation], regions: Sequence[Region]
) -> tuple[dict[Operation, Work | None], dict[int, set[int]]]:
    """The kernels of compiled regions, and the storages that none writes, as they are read inside of kernels alone.

    Args:
        operations: all operations of a trace in order, also those outside of the regions.
        regions: its compiled regions.

    Returns:
        by operation the kernel of which it is the last, and None for all other operations of the regions; by number of
        a storage that is not written, those that it is computed from.
    """
    kernels = _Kernels(operations, regions)
    found: dict[Operation, Work | None] = {}
    for region in regions:
        found.update(dict.fromkeys(region.operations))
        for run in _runs(region):
            found[run[-1]] = kernels.work_of(run)
    return found, kernels.not_written()


def _runs(region: Region) -> list[list[Operation]]:
    """The operations of each kernel of a region; a sum over rows does not end the run around it."""
    found: list[list[Operation]] = []
    run: list[Operation] = []
    for each in region.operations:
        if each.fuses and not each.sums_rows:
            run.append(each)
            continue
        if not each.fuses and run:
            found.append(run)
            run = []
        found.append([each])
    return [*found, run] if run else found


class _Kernels:
    def __init__(self, operations: Sequence[Operation], regions: Sequence[Region]) -> None:
        self._run_of: dict[Operation, tuple[int, bool]] = {}  # a number of the run of neighbours, and if it is backward
        number = 0
        for region in regions:
            number += 1
            for each in region.operations:
                number += not each.fuses
                if each.fuses:
                    self._run_of[each] = number, region.backward
        self._makers: dict[int, Operation] = {}
        self._read: set[int] = set()
        self._in_memory: set[int] = set()  # storages that fused operations write for others
        for each in operations:
            for storage, _ in each.reads:
                self._read.add(storage)
                made = self._run_of.get(self._makers.get(storage, each))
                if made is not None and not self._is_fused_away(made, each):
                    self._in_memory.add(storage)
            for storage, _ in each.writes:
                self._makers.setdefault(storage, each)

    def _is_fused_away(self, made: tuple[int, bool], reader: Operation) -> bool:
        """Whether ``reader`` is computed in the same kernel, or computes again what a forward's kernel has computed."""
        read = self._run_of.get(reader)
        return read is not None and (read == made or (read[1] and not made[1]))

    def not_written(self) -> dict[int, set[int]]:
        """By number of a storage that exists in registers alone, those in memory that it is computed from."""
        found: dict[int, set[int]] = {}
        for storage, maker in self._makers.items():
            if maker in self._run_of and storage in self._read and storage not in self._in_memory:
                reads: Bytes = {}
                self._read_from((storage, 0), 0, reads, set())
                found[storage] = {source for source, _ in reads}
        return found

    def work_of(self, run: Sequence[Operation]) -> Work:
        """The work of operations that one kernel computes: what is both written and read inside of it stays there."""
        if not run[0].fuses:
            return run[0].work
        inside = {storage for each in run for storage, _ in each.writes}
        reads: Bytes = {}
        writes: Bytes = {}
        for each in run:
            for place, num_bytes in each.reads.items():
                if place[0] not in inside:
                    self._read_from(place, num_bytes, reads, set())
            for place, num_bytes in each.writes.items():
                if place[0] in self._in_memory or place[0] not in self._read:
                    _add(writes, place, num_bytes)
        return Work(0, sum(reads.values()) + sum(writes.values()), run[-1].work.dtype)

    def _read_from(self, place: tuple[int, int], num_bytes: int, reads: Bytes, seen: set[int]) -> None:
        """Add to ``reads`` what lies at the place, or if it is not in memory what it is computed from."""
        storage, _ = place
        maker = self._makers.get(storage)
        if maker is None or maker not in self._run_of or storage in self._in_memory:
            _add(reads, place, num_bytes)
        elif storage not in seen:
            seen.add(storage)
            for source, source_bytes in maker.reads.items():
                self._read_from(source, source_bytes, reads, seen)
