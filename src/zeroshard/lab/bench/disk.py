"""What a rank's disk does for state that is kept there: the file of `zeroshard.zero.offload.disk`, without an update.

    disk walk     each unit read, and written back while the next ones are read, as the host's updates do; bytes of the
                  file, each of which is read and written
    disk write    gradients, as backward leaves them
    disk gather   master weights, as gathers of backward read them in the file, beside those gradients

On a CPU the first two run beside computation, as in a step: a virtual disk's work is done by the cores that compute.
Past the page cache where the file system allows it (``O_DIRECT``), except for what gathers read. The file is larger
than what a disk, or the host of a virtual one, has in a cache of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zeroshard.zero.offload.grad_slots import GradSlots
from zeroshard.zero.offload.rank_files import file_of_rank
from zeroshard.zero.offload.staging import Landing, Staging

UNIT_BYTES, NUM_UNITS = 16 << 20, 24


class _Unit:
    """A key of the file."""


def cases(folder: Path, rank: int, *, computes: bool) -> Iterator[tuple[str, tuple[float, Callable[[], object]]]]:
    """Yield the name of each case, the bytes of a call, and the call; ``computes``: what it runs beside.

    Raises:
        UserError: the folder cannot be made or written, another run uses it, or the disk has no room.
    """
    file = file_of_rank(folder, rank)
    num_bytes = float(UNIT_BYTES * NUM_UNITS)
    units = [_Unit() for _ in range(NUM_UNITS)]
    values = torch.zeros(UNIT_BYTES // 4)
    views = [file.add(unit, [values])[0] for unit in units]

    def walk() -> None:
        with _computation(computes):
            file.expect(units)
            for unit in units:
                file.read(unit)
                file.write(unit)
            file.settle()

    yield "disk walk", (num_bytes, walk)
    inputs, slots = [_Unit() for _ in range(NUM_UNITS)], GradSlots(file, Staging(None))
    for unit in inputs:
        file.add_input(unit, len(values), values.dtype)
    narrow = torch.empty(len(values), dtype=torch.bfloat16)

    def gather() -> None:
        landings = []
        for unit, view, grads in zip(units, views, inputs, strict=True):
            file.will_read(unit)
            narrow.copy_(view)
            file.forget_pages(unit)
            landings.append(slots.send(grads, values))
        _finish(landings)

    yield "disk gather", (num_bytes, gather)

    def write() -> None:
        with _computation(computes):
            _finish([slots.send(unit, values) for unit in inputs])

    yield "disk write", (num_bytes, write)


@contextmanager
def _computation(wanted: bool) -> Generator[None]:
    """Matrices are multiplied on a thread of this rank meanwhile, if that is ``wanted``."""
    over = threading.Event()

    def multiply() -> None:
        rows = torch.zeros(256, 512)
        weights = torch.zeros(512, 512)
        while not over.is_set():
            rows @ weights

    thread = threading.Thread(target=multiply, name="zeroshard-computes")
    if wanted:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if wanted:
            thread.join()


def _finish(landings: list[Landing]) -> None:
    for landing in landings:
        landing.synchronize()
