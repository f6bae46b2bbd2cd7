"""The quantisation cases of `bench device`: seconds per call and per element, by wire format and direction.

    quantise, to the nearest    fp32 numbers to codes, as weights are sent
    quantise, stochastically    the same with random rounding, as gradients are sent
    dequantise                  codes to fp32 numbers
    sum                         received pieces added to a rank's own in fp32
    decode                      codes of frozen weights to fp32 numbers, in blocks of their own sizes

The implementation is the one that the engine uses on that device: PyTorch on a CPU, Triton kernels on a GPU. Blocks
have the default size, `zeroshard.settings.wire_formats.BLOCK`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from zeroshard.kernels import dequantise, dequantised_sum, quantise
from zeroshard.lab.predict.conversions import CONVERSIONS, Conversion
from zeroshard.settings.wire_formats import FORMATS, BlockFormat, rounding_key
from zeroshard.zero import FrozenFormat
from zeroshard.zero.frozen_formats.settings import FrozenName

SIZES = {"cpu": (1 << 14, 1 << 20), "cuda": (1 << 18, 1 << 26)}  # elements of a small buffer, and of a unit's buffer
NUM_RECEIVED = 2  # pieces that are added to a rank's own
POOL = 1 << 23  # elements of all buffers that take turns, so that the next one is in no cache, as in a training step
Buffers = tuple[Tensor, Tensor, Tensor]
"""The tensors of one call: values, packed rows, and the output of dequantising."""


def cases(device: torch.device) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield (name, number of converted elements, call); a name is ``wire``, a key of `Device.conversions`, a size."""
    largest = max(POOL, *SIZES[device.type])
    whole, back = torch.randn(largest, device=device), torch.empty(largest, device=device)
    for numel in SIZES[device.type]:
        for name in FORMATS:
            pool = _pool(BlockFormat(name), numel, whole, back)
            for kind in CONVERSIONS:
                times = NUM_RECEIVED if kind == "sum" else 1
                yield f"wire {name} {kind} {numel}", times * numel, _call(BlockFormat(name), kind, pool)
        for frozen in get_args(FrozenName):
            form = FrozenFormat(frozen).form
            yield f"wire {frozen} decode {numel}", numel, _call(form, "decode", _pool(form, numel, whole, back))


def _pool(form: BlockFormat, numel: int, whole: Tensor, back: Tensor) -> list[Buffers]:
    """Cut ``whole`` and ``back`` into the buffers of several calls, and fill their packed rows."""
    pool = []
    for values, place in zip(whole.split(numel), back.split(numel), strict=True):
        rows = torch.empty(1 + NUM_RECEIVED, form.num_bytes(len(values)), dtype=torch.uint8, device=values.device)
        for row in rows:
            quantise(values, row, form)
        pool.append((values, rows, place))
    return pool


def _call(form: BlockFormat, kind: Conversion, pool: Sequence[Buffers]) -> Callable[[], object]:
    key, turns = rounding_key(0, 0, form.name, 0), itertools.cycle(pool)
    calls: Mapping[Conversion, Callable[[Tensor, Tensor, Tensor], object]] = {
        "quantise": lambda values, rows, _: quantise(values, rows[0], form),
        "quantise stochastically": lambda values, rows, _: quantise(values, rows[0], form, key),
        "decode": lambda _, rows, back: dequantise(rows[1], back, form),
        "dequantise": lambda _, rows, back: dequantise(rows[1], back, form),
        "sum": lambda values, rows, back: dequantised_sum(rows, values, 0, back, form),
    }
    call = calls[kind]
    return lambda: call(*next(turns))


def conversions_of(
    middle: Mapping[str, float], amounts: Mapping[str, Any], fitted: Callable[..., tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Seconds per call and per element, by the names of `zeroshard.lab.predict.conversions`.

    Args:
        middle: median seconds by case name; cases other than those of `cases` are ignored.
        amounts: converted elements by case name.
        fitted: fits (constant, rate) to sizes and seconds, as `zeroshard.lab.bench.device.fitted`.
    """
    found: dict[str, list[str]] = {}
    for name in middle:
        if name.startswith("wire "):
            found.setdefault(name.removeprefix("wire ").rpartition(" ")[0], []).append(name)
    costs = {}
    for name, names in found.items():
        call_s, element_s = fitted([amounts[each] for each in names], [middle[each] for each in names])
        costs[name] = (call_s / (NUM_RECEIVED if name.endswith(" sum") else 1), element_s)
    return costs
