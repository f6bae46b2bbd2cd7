"""List the differences between two checkpoints, whatever strategy and number of ranks wrote them.

Values are compared bit by bit, a few megabytes of each side at a time, so differences that a numeric comparison would
hide (-0.0, NaN) are reported too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import Manifest, TensorEntry
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.streamed_safetensors import intervals
from zeroshard.optim.named_shards import FROZEN

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differences(first: tuple[Path, Manifest], second: tuple[Path, Manifest]) -> Iterator[str]:
    """Yield one line for each difference in step, ``extra``, param groups, tied names and tensors.

    The run, the number of ranks, the pieces and the versions that wrote a checkpoint are not compared.

    Args:
        first: a checkpoint's folder and its manifest, as `open_manifest` returns them.
        second: the same of the checkpoint to compare with.
    """
    (folder_a, a), (folder_b, b) = first, second
    extras = [{key: value for key, value in m.extra.items() if key != "run"} for m in (a, b)]
    facts = [
        {"step": m.step, "extra": extra, "param_groups": list(m.param_groups), "tied": m.tied}
        for m, extra in zip((a, b), extras, strict=True)
    ]
    yield from _differences_of_facts("", *facts)
    ours, theirs = ({(entry.name, entry.kind): entry for entry in manifest.tensors} for manifest in (a, b))
    with CheckpointReader(folder_a, a) as reader_a, CheckpointReader(folder_b, b) as reader_b:
        for key in sorted(ours.keys() | theirs.keys()):
            what = f"{key[1]} of {key[0]}"
            one, other = ours.get(key), theirs.get(key)
            if one is None or other is None:
                yield f"{what}: only in the {'second' if one is None else 'first'}"
            elif (one.shape, one.dtype) != (other.shape, other.dtype):
                yield f"{what}: {one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
            else:
                count, largest = _compare(reader_a, reader_b, one)
                if count and key[1] == FROZEN:
                    yield f"{what}: not equal, so the base or its format is another one"
                elif count:
                    total = prod(one.shape)
                    yield f"{what}: {count:,} of {total:,} elements differ, by {largest:.3g} at the most"


def _compare(a: CheckpointReader, b: CheckpointReader, entry: TensorEntry) -> tuple[int, float]:
    """Return how many elements differ in their bits, and the largest absolute difference (NaN if it involves a NaN)."""
    count, largest = 0, torch.zeros((), dtype=torch.float64)
    for interval in intervals(prod(entry.shape)):
        one, other = (reader.read(entry.name, entry.kind, interval) for reader in (a, b))
        differ = _bits(one) != _bits(other)
        if num := int(differ.sum()):
            count += num
            gap = (one[differ].double() - other[differ].double()).abs().max()
            largest = torch.maximum(largest, gap)  # torch.maximum propagates NaN
    return count, float(largest)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _differences_of_facts(name: str, a: Any, b: Any) -> Iterator[str]:
    """Yield a line for each difference, descending into mappings, and into lists of equal length."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        a, b = ({str(index): value for index, value in enumerate(each)} for each in (a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys((*a, *b)):
            dotted = f"{name}.{key}" if name else str(key)
            if key not in a or key not in b:
                yield f"{dotted}: only in the {'second' if key not in a else 'first'}"
            else:
                yield from _differences_of_facts(dotted, a[key], b[key])
    elif a != b:
        yield f"{name}: {a!r} and {b!r}"
