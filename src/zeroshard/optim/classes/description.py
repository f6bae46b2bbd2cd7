"""Describes an optimizer in lines: ranks with different optimizers or learning rates would train without any error.

At stage 0 their weights would drift apart; above it each rank's part of the weights would be trained in another way.

So would it be if a class estimates something of all tensors, and notes it in its param groups: each rank has estimated
it of other tensors. The trials of a class (`zeroshard.optim.classes.probe`) should have told so before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

# How an update is computed, not what it computes: ranks on different devices may choose differently.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_PLAIN = (bool, int, float, complex, str, type(None))


def described(
    optimizer: Optimizer, num_params: Iterable[int], is_everywhere: Callable[[int], bool] = lambda index: True
) -> list[str]:
    """Describe an optimizer in lines, one for each setting of each param group; the same on ranks that do alike.

    What the class's constructor takes is a setting. Any other fraction in a group is something that the class's own
    step has found. Whole numbers count steps, and a rank that owns nothing of a group may count none.

    Args:
        num_params: how many of the model's parameters are in each group, over all ranks.
        is_everywhere: whether each rank updates some parameter of the group with this index.
    """
    kind = type(optimizer)
    name, lines = f"{kind.__module__}.{kind.__qualname__}", []
    for index, (group, count) in enumerate(zip(optimizer.param_groups, num_params, strict=False)):
        lines.append(f"{name}, group {index} of {count} parameters")
        named = {*(_settings(kind) or optimizer.defaults), "initial_lr"}  # a scheduler adds the latter
        settings = sorted(named & group.keys() - _IMPLEMENTATION)
        lines += [f"{name}, group {index}, {key} = {_value(group[key])}" for key in settings]
        found = sorted(key for key in group.keys() - {*settings} if _is_fraction(group[key]))
        if found and is_everywhere(index):
            noted = "as its own step has noted (ranks that differ here train right at stage 0 alone)"
            lines += [f"{name}, group {index}, {key} = {_value(group[key])}, {noted}" for key in found]
    return lines


@cache
def _settings(kind: type[Optimizer]) -> frozenset[str]:
    """The settings that a class's constructor names; empty if it takes any."""
    taken = inspect.signature(kind).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        return frozenset()
    return frozenset(taken) - {"params"}


def _is_fraction(value: Any) -> bool:
    """Whether it is a number that is not whole; on a device the host would have to wait for it."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" and value.is_floating_point():
        value = value.item()
    return isinstance(value, float) and not value.is_integer()


def _value(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):  # on a device the host would have to wait for its value
        return repr(value.item()) if value.numel() == 1 and value.device.type == "cpu" else f"a tensor {value.shape}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_value(each)}" for key, each in value.items())
    if isinstance(value, Sequence):
        return f"({', '.join(map(_value, value))})"
    return type(value).__name__
