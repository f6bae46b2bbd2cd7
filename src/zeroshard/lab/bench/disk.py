"""What a rank's disk does for state that is kept there: the file of `zeroshard.zero.offload.disk`, without an update.

    disk walk     each unit read, and written back while the next ones are read, as the host's updates do; bytes of the
                  file, each of which is read and written
    disk write    gradients, as backward leaves them
    disk gather   master weights, as gathers of backward read them in the file, beside those gradients

On a CPU the first two run beside computation, as in a step: a virtual disk's work is done by the cores that compute.
How many seconds of computation each costs is measured too (``disk walk beside``, ...).
Past the page cache where the file system allows it (``O_DIRECT``), except for what gathers read. The file is larger
than what a disk, or the host of a virtual one, has in a cache of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from zeroshard.zero.offload.grad_slots import GradSlots
from zeroshard.zero.offload.rank_files import file_of_rank
from zeroshard.zero.offload.staging import Landing, Staging

UNIT_BYTES, NUM_UNITS = 16 << 20, 24
ALONE_S = 0.5  # for which computation is alone, before a disk works beside it


class _Unit:
    """A key of the file."""


class Case(NamedTuple):
    """One thing that a disk does: its name, the bytes of a call, and the call.

    ``lost_s``: takes the call beside computation and returns the seconds of computation that it costs; None: as nothing
    is computed on these cores.
    """

    name: str
    num_bytes: float
    call: Callable[[], object]
    lost_s: Callable[[], float] | None


def cases(folder: Path, rank: int, *, computes: bool) -> Iterator[Case]:
    """Yield each case; ``computes``: the host computes too, so walks and writes run beside that.

    Raises:
        UserError: the folder cannot be made or written, another run uses it, or the disk has no room.
    """
    file = file_of_rank(folder, rank)
    num_bytes = float(UNIT_BYTES * NUM_UNITS)
    units = [_Unit() for _ in range(NUM_UNITS)]
    values = torch.zeros(UNIT_BYTES // 4)
    views = [file.add(unit, [values])[0] for unit in units]

    def case(name: str, call: Callable[[], object], measured: Callable[[], object] | None = None) -> Case:
        """``measured``: what is timed, without computation; not given: ``call``, beside it."""
        timed = measured or ((lambda: _beside(call)) if computes else call)
        return Case(name, num_bytes, timed, (lambda: _lost_s(call)) if computes else None)

    def walk() -> None:
        file.expect(units)
        for unit in units:
            file.read(unit)
            file.write(unit)
        file.settle()

    yield case("disk walk", walk)
    inputs, slots = [_Unit() for _ in range(NUM_UNITS)], GradSlots(file, Staging(None))
    for unit in inputs:
        file.add_input(unit, len(values), values.dtype)
    narrow = torch.empty(len(values), dtype=torch.bfloat16)

    def gather(*, sends: bool) -> None:
        landings = []
        for unit, view, grads in zip(units, views, inputs, strict=True):
            file.will_read(unit)
            narrow.copy_(view)
            file.forget_pages(unit)
            landings += [slots.send(grads, values)] if sends else []
        _finish(landings)

    yield case("disk gather", partial(gather, sends=False), partial(gather, sends=True))
    yield case("disk write", lambda: _finish([slots.send(unit, values) for unit in inputs]))


class _Computation:
    """Matrices are multiplied on a thread of this rank, until it is left; ``num_done``: so many."""

    def __init__(self) -> None:
        self.num_done, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._multiply, name="zeroshard-computes")

    def _multiply(self) -> None:
        rows, weights = torch.zeros(256, 512), torch.zeros(512, 512)
        while not self._over.is_set():
            rows @ weights
            self.num_done += 1

    def __enter__(self) -> _Computation:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def _beside(call: Callable[[], object]) -> None:
    with _Computation():
        call()


def _lost_s(call: Callable[[], object]) -> float:
    """Seconds of computation that are lost during ``call``, by how much is computed without it."""
    with _Computation() as computation:
        times, counts = [time.perf_counter()], [computation.num_done]
        for work in (lambda: time.sleep(ALONE_S), call):
            work()
            times.append(time.perf_counter())
            counts.append(computation.num_done)
    alone = (counts[1] - counts[0]) / (times[1] - times[0])
    return max(times[2] - times[1] - (counts[2] - counts[1]) / max(alone, 1e-9), 0.0)


def _finish(landings: list[Landing]) -> None:
    for landing in landings:
        landing.synchronize()
