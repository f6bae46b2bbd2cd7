"""Whether an optimizer's update gives the same bits on the host as on the device: 1,024 elements are stepped on both.

A GPU's kernels and a CPU's may round at other places: torch's fused AdamWs do (docs/numerics.md, "One AdamW, three
programs"). On the CPU both are the same machine. Then the two paths are one tensor on the thread that calls, and pieces
of it, as long as a rank's pieces are, on a thread of their own, as the executor's is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.optim.classes.reach import declared
from zeroshard.zero.core.layout import ALIGNMENT

NUM_ELEMENTS = 1024
NUM_STEPS = 3
CUTS = (21 * ALIGNMENT, 42 * ALIGNMENT)  # ends of pieces: shards are multiples of `ALIGNMENT`
HOST = torch.device("cpu")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Comparison:
    """What a probe has found."""

    num_different: int  # of `NUM_ELEMENTS`, those whose weight or any state differs after some step
    most_ulp: int | None  # the largest difference of their weights, in units in the last place; None: one is NaN

    def __str__(self) -> str:
        if not self.num_different:
            return "update on the host: same bits as on the device"
        most = "one is NaN" if self.most_ulp is None else f"weights by at most {self.most_ulp:,} ulp"
        return f"update on the host: differs in {self.num_different:,} of {NUM_ELEMENTS:,} elements, {most}"


def compare_updates(optimizer: Optimizer, device: torch.device, dtype: torch.dtype = torch.float32) -> Comparison:
    """Step 1,024 elements by the optimizer's class on ``device`` and on the host, with the settings of each group.

    The optimizer itself is not touched. ``dtype``: of the master weights.

    Raises:
        Exception: what the class raises for a parameter of `NUM_ELEMENTS`, in one dimension and in two.
    """
    found = [_compare(type(optimizer), _settings(optimizer, group), device, dtype) for group in optimizer.param_groups]
    ulps = [each.most_ulp for each in found if each.num_different]
    known = [ulp for ulp in ulps if ulp is not None]
    most = None if len(known) < len(ulps) else max(known, default=0)
    return Comparison(max((each.num_different for each in found), default=0), most)


def _settings(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    accepted = signature(type(optimizer)).parameters
    return {key: deepcopy(group.get(key, value)) for key, value in optimizer.defaults.items() if key in accepted}


def _compare(cls: Any, settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Comparison:
    try:
        return _both_paths(cls, settings, device, dtype, shape=(NUM_ELEMENTS,))
    except ValueError:  # some classes, such as Muon, take matrices alone: these are never cut
        return _both_paths(cls, settings, device, dtype, shape=(32, NUM_ELEMENTS // 32))


def _both_paths(cls: Any, settings: dict[str, Any], device: torch.device, dtype: torch.dtype, shape: Any) -> Comparison:
    kind = declared(cls, settings)
    cuts = CUTS if kind is None or kind.block == 1 else (kind.block, 2 * kind.block)  # pieces end where blocks do
    cuts = () if len(shape) > 1 else tuple(cut for cut in cuts if cut < NUM_ELEMENTS)
    on_device = _steps(cls, settings, _values(dtype, shape), device, ())
    with ThreadPoolExecutor(1) as thread:  # as the executor's: with rounding modes of its own
        on_host = thread.submit(lambda: list(_steps(cls, settings, _values(dtype, shape), HOST, cuts))).result()
    differs, most, has_nan = torch.zeros(NUM_ELEMENTS, dtype=torch.bool), 0, False
    for here, there in zip(on_device, on_host, strict=True):
        apart = [_ulps(a, b) for a, b in zip(here, there, strict=True)]
        for each in apart:  # a counter of steps, or a factor of a matrix, is of all elements
            differs |= each != 0 if each.numel() == NUM_ELEMENTS else (each != 0).any()
        has_nan = has_nan or bool((here[0].isnan() != there[0].isnan()).any())
        most = max(most, int(apart[0].max()))
    return Comparison(int(differs.sum()), None if has_nan else most)


def _values(dtype: torch.dtype, shape: Sequence[int]) -> list[Tensor]:
    """The weights, and a gradient for each step: ordinary values, zeros, denormal and huge ones, in fixed places."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for place in range(1 + NUM_STEPS):
        values = torch.randn(NUM_ELEMENTS, generator=generator, dtype=torch.float64)
        values *= 10.0 ** torch.randint(-8, 2, (NUM_ELEMENTS,), generator=generator)
        values[place :: 16 + place] = 0.0
        values[place + 1 :: 32] *= torch.finfo(dtype).tiny
        values[place + 2 :: 64] *= torch.finfo(dtype).max ** 0.25
        made.append(values.to(dtype).view(*shape))
    return made


def _steps(
    cls: Any, settings: dict[str, Any], values: Sequence[Tensor], device: torch.device, cuts: Sequence[int]
) -> Iterator[list[Tensor]]:
    """After each step: weights, then each kind of state, as one tensor on the host each."""
    weights, *grads = ([part.to(device, copy=True) for part in value.tensor_split(list(cuts))] for value in values)
    pieces = [nn.Parameter(part) for part in weights]
    optimizer = cls(pieces, **deepcopy(settings))
    for parts in grads:
        for piece, part in zip(pieces, parts, strict=True):
            piece.grad = part
        optimizer.step()
        kinds = sorted(kind for kind, value in optimizer.state[pieces[0]].items() if isinstance(value, Tensor))
        kept = [[optimizer.state[piece][kind] for piece in pieces] for kind in kinds]
        yield [_joined([piece.detach() for piece in pieces]), *map(_joined, kept)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The pieces' values as one tensor; what each piece has alike, such as a counter, once."""
    parts = [part.to(HOST, copy=True) for part in parts]
    return torch.cat(list(parts)).flatten() if parts[0].dim() else parts[0]


def _ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many numbers of their dtype lie between each two elements; 0 for two NaN, and 1 for zeros of two signs."""

    def ordered(values: Tensor) -> Tensor:
        bits = values.contiguous().view(_INTEGERS[values.itemsize])
        smallest = torch.iinfo(bits.dtype).min
        return torch.where(bits < 0, smallest - bits.long() - 1, bits.long())

    return torch.where(a.isnan() & b.isnan(), 0, (ordered(a) - ordered(b)).abs())
