"""Which parameters decay: matrices and embeddings do, biases, norm weights and scalars do not.

Decay keeps matrices small; a vector that scales or shifts each channel has few values, and pulling those to
zero only works against the norm that they belong to (arXiv:1812.01187, section 3.1, "no bias decay").
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from torch import Tensor

MIN_DECAYED_NDIM = 2


def decay_groups(named_params: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into a group that decays and one that does not, for any torch optimizer.

    The number of dimensions of the *original* parameter decides, so give ``model.named_parameters()``, whose
    tensors keep their shapes when an engine shards them underneath. A parameter under two names is taken
    once, by its first name; a frozen one is left out. Order within a group is that of ``named_params``.

    Args:
        named_params: (name, parameter) pairs.
        weight_decay: of the group that decays, >= 0.

    Returns:
        One or two dicts with ``"params"``, ``"weight_decay"`` and ``"param_names"``, torch's own key for the
        names of a group's parameters; a group without parameters is left out.

    Raises:
        ValueError: ``weight_decay`` is negative or not finite, or no parameter is trainable.
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
