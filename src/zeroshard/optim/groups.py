"""Param groups with and without weight decay: matrices and embeddings decay; biases, norm weights and scalars do not.

Decay keeps matrices small. A vector that scales or shifts each channel has few values, and decaying those only works
against the normalisation that they belong to (arXiv:1812.01187, section 3.1, "no bias decay").
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from torch import Tensor

MIN_DECAYED_NDIM = 2


def decay_groups(named_params: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into a group that decays and one that does not, for any torch optimizer.

    The number of dimensions of the *original* parameter decides. So give ``model.named_parameters()``, whose tensors
    keep their shapes when an engine shards them. A parameter with two names is taken once, under its first name; frozen
    parameters are left out. The order within a group is that of ``named_params``.

    Args:
        named_params: (name, parameter) pairs.
        weight_decay: weight decay of the group that decays, >= 0.

    Returns:
        One or two dicts with ``"params"``, ``"weight_decay"`` and ``"param_names"`` (torch's own key for the names of a
        group's parameters); a group without parameters is left out.

    Raises:
        ValueError: ``weight_decay`` is negative, NaN or Inf, or no parameter is trainable.
    """
    if not (isfinite(weight_decay) and weight_decay >= 0):
        raise ValueError(f"weight_decay: {weight_decay} is not a finite number >= 0")
    decayed: dict[str, Any] = {"params": [], "param_names": [], "weight_decay": weight_decay}
    undecayed: dict[str, Any] = {"params": [], "param_names": [], "weight_decay": 0.0}
    seen: set[int] = set()
    for name, param in named_params:
        if not param.requires_grad or id(param) in seen:
            continue
        seen.add(id(param))
        group = decayed if param.ndim >= MIN_DECAYED_NDIM else undecayed
        group["params"].append(param)
        group["param_names"].append(name)
    groups = [group for group in (decayed, undecayed) if group["params"]]
    if not groups:
        raise ValueError("named_params: no parameter is trainable, so there is nothing to optimize")
    return groups
