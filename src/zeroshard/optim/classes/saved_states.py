"""Saved states of an optimizer, as a load reads them: those of parameters, or of pieces of them, in the kept types.

`zeroshard.optim.classes.kept_states` decides whether they are the states that the optimizer keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.optim.classes.kept_states import Kept, ParamFacts, SavedState, alike, is_by_block, of_groups
from zeroshard.optim.classes.plain_states import FORM, nested
from zeroshard.optim.named_shards import (
    MODEL_KINDS,
    ShardReader,
    after_restoring,
    read_whole,
    saved_dtype,
    saved_settings,
)

CODES = "_codes"  # a state that is called exp_avg in fp32 is exp_avg_codes in 8 bits, and exp_avg_scales
# torch keeps one number of each for a parameter; the form of a state is that of each piece too
NEVER_CUT = frozenset({"step", "eta", "mu", "mu_product", FORM})


def blocks_of(interval: tuple[int, int], block: int) -> tuple[int, int]:
    """``[start, stop)`` of the blocks of a parameter that an interval of it covers; it begins where a block does."""
    assert interval[0] % block == 0, f"an interval begins at {interval[0]}, inside a block of {block}"
    return interval[0] // block, -(-interval[1] // block)


def may_need_conversion(make: partial[Optimizer], kinds: Iterable[str]) -> bool:
    """Whether saved kinds of state may have another form than the class keeps.

    `zeroshard.optim.state_conversion` knows.
    """
    of_torch = getattr(make.func, "__module__", "").startswith("torch.optim")  # these classes keep no codes
    return any(kind.endswith(CODES) or not of_torch for kind in kinds if kind not in MODEL_KINDS)


def grouped_facts(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[tuple[dict[str, Any], list[ParamFacts]]]:
    """Return the param groups of an optimizer of whole ``params``, each with what it knows of its parameters."""
    facts = {
        id(param): ParamFacts(name, tuple(param.shape), param.dtype, param.device) for name, param in params.items()
    }
    return [(group, [facts[id(param)] for param in group["params"]]) for group in optimizer.param_groups]


def kept_by(
    make: partial[Optimizer], groups: Iterable[tuple[Mapping[str, Any], Sequence[ParamFacts]]], reader: ShardReader
) -> dict[str, Kept]:
    """As `of_groups`, of the saved states that ``reader`` has; ``groups``: each with its current settings."""
    found: list[tuple[Mapping[str, Any], Mapping[str, Any] | None, Sequence[ParamFacts]]] = []
    for settings, params in groups:
        saved = saved_settings(reader, (param.name for param in params))
        found.append(({**settings, **after_restoring(settings, saved or {})}, saved, params))
    return of_groups(make, found, cache(partial(_saved_states, reader)))


def _saved_states(reader: ShardReader, name: str) -> dict[str, SavedState]:
    kinds = {kind: shape for kind, shape in reader.kinds(name).items() if kind not in MODEL_KINDS | {FORM}}
    return {kind: SavedState(shape, saved_dtype(reader, name, kind)) for kind, shape in kinds.items()}


def read_states(
    reader: ShardReader,
    name: str,
    kept: Kept,
    param_shape: tuple[int, ...],
    interval: tuple[int, int] | None,
    block: int = 1,
) -> dict[Any, Any]:
    """Read the states of one piece of a parameter, which keeps blocks of ``block`` elements.

    ``interval``: of the piece, None: the parameter is whole.
    """
    found: dict[str, Any] = {}
    for kind, shape in reader.kinds(name).items():
        if kind in MODEL_KINDS:
            continue
        if interval is None or kind == FORM:
            value = read_whole(reader, name, kind, shape)
        elif kind not in NEVER_CUT and is_by_block(shape, prod(param_shape), block):
            value = reader.read(name, kind, blocks_of(interval, block))
        elif kind in NEVER_CUT or shape != param_shape:
            value = reader.read(name, kind, (0, 1)).reshape(())
        else:
            value = reader.read(name, kind, interval)
        found[kind] = alike(kept.get(kind), value)
    return nested(found)
