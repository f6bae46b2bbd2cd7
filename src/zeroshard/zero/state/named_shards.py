"""What a checkpoint knows of the engine: one-dimensional pieces of flattened tensors, by ordinary names.

Every strategy speaks in these pieces, so what was saved at one stage and world size can be read at another:
a reader asks for an interval of a tensor, never for a rank's file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.errors import UserError

# What replicas that take local steps keep beside their weights: see `zeroshard.zero.replicas.saved`.
OUTER_KINDS = frozenset({"anchor", "outer_momentum", "outer_difference", "outer_steps", "outer_due", "outer_left"})
GATHERED = "gathered"  # what every rank has, where differences to it travel: `zeroshard.zero.buffers.common_copy`
ROUNDING = "rounding_step"  # that gradients in a wire format are rounded by next
MODEL_KINDS = (
    frozenset({"param", "buffer", "ema", GATHERED, ROUNDING}) | OUTER_KINDS
)  # every other kind is a state of an optimizer
_REPLICA = "@replica"  # in the name of what one replica has alone


def of_replica(name: str, number: int) -> str:
    """The name under which a checkpoint has what one replica alone has of a parameter."""
    return f"{name}{_REPLICA}{number}"


def is_of_replica(name: str) -> bool:
    """Whether it is such a name."""
    return _REPLICA in name


@dataclass(frozen=True)
class NamedShard:
    """A 1-D piece of a flattened tensor.

    Attributes:
        name: the parameter's or buffer's name in ``model.state_dict()``; a tied parameter has its first name.
        kind: ``"param"``, ``"buffer"``, or the optimizer's own name of a state (``"exp_avg"``, ``"step"``).
        shape: of the whole tensor; ``()`` for a scalar state.
        interval: ``[start, stop)`` in elements of the flattened whole tensor.
        tensor: ``[stop - start]``, any dtype; shares the engine's memory, so copy it before the next step.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    interval: tuple[int, int]
    tensor: Tensor


class ShardReader(Protocol):
    """Random access to saved tensors by interval."""

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Every saved kind of ``name`` with the whole tensor's shape; empty where nothing was saved."""
        ...

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """The piece ``[start, stop)`` of the flattened tensor: 1-D, on the CPU, the caller's own to keep and change."""
        ...


def require_shape(reader: ShardReader, name: str, kind: str, shape: tuple[int, ...]) -> None:
    """Raise UserError unless ``name`` was saved with this shape: a smaller tensor would take a part of a larger one."""
    saved = reader.kinds(name).get(kind)
    if saved == shape:
        return
    what = f"{'' if kind == 'param' else f'{kind} '}saved with shape {saved}, the model's is {shape}"
    if saved is None:
        what = f"the checkpoint has no {kind} of it"
    raise UserError(name, what, "load it into the model that it was saved from")


def read_whole(reader: ShardReader, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor, on the CPU; UserError where it was saved with another shape, or not at all."""
    require_shape(reader, name, kind, shape)
    return reader.read(name, kind, (0, prod(shape))).view(shape)


def named_group(group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An optimizer's param group as JSON can hold it: its settings, and the names of its ``params``.

    A number in a tensor becomes a number, and what JSON has no word for its ``repr``.
    """
    return {**{key: _plain(value) for key, value in group.items() if key != "params"}, "params": list(names)}


def named_groups(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """`named_group` of each of an optimizer's groups; ``params``: by their names, all that it updates."""
    return [named_group(group, names) for group, names in _with_names(optimizer, params)]


def restore_groups(optimizer: Optimizer, params: Mapping[str, Tensor], saved: Sequence[Mapping[str, Any]]) -> None:
    """`restore_settings` of what `named_groups` gave."""
    groups = _with_names(optimizer, params)
    restore_settings([group for group, _ in groups], [names for _, names in groups], saved)


def _with_names(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[tuple[dict[str, Any], list[str]]]:
    names = {id(param): name for name, param in params.items()}
    return [(group, [names[id(param)] for param in group["params"]]) for group in optimizer.param_groups]


# How a step is computed, not what: right for the machine that saved, and not always for the one that loads.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_OF_SCHEDULERS = frozenset({"initial_lr"})  # a scheduler that goes on asks for it


def restore_settings(
    groups: Sequence[dict[str, Any]], names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Give param groups the settings that `named_group` wrote down, as ``optimizer.load_state_dict`` does.

    A group takes those of the saved group with the same parameters. Which kernels compute (``foreach``, ``fused``,
    ``capturable``) stays as it is. A group that has no counterpart keeps its settings, and a warning says so.

    Args:
        groups: an optimizer's; changed in place.
        names: of each group's parameters.
        saved: as `named_group` made them.
    """
    by_members = {frozenset(group["params"]): group for group in saved}
    for group, members in zip(groups, names, strict=True):
        found = by_members.get(frozenset(members))
        if found is None and saved:
            warnings.warn(
                f"load: no saved param group has the parameters of the one with {members[0] if members else 'none'}; "
                "it keeps its lr and other settings",
                stacklevel=3,
            )
        for key, value in (found or {}).items():
            if key not in _IMPLEMENTATION and key != "params" and (key in group or key in _OF_SCHEDULERS):
                group[key] = _restored(group.get(key), value)


def _restored(current: Any, saved: Any) -> Any:
    """``saved`` in the form of ``current``; that one itself where JSON could not hold such a thing."""
    if isinstance(current, Tensor) and isinstance(saved, int | float) and current.numel() == 1:
        return current.detach().clone().fill_(saved)
    if isinstance(current, list | tuple) and isinstance(saved, list) and len(current) == len(saved):
        return type(current)(_restored(*pair) for pair in zip(current, saved, strict=True))
    if isinstance(current, float) and isinstance(saved, str):
        return float(saved)
    plain = current is None or isinstance(current, bool | int | float | str)
    return saved if plain and not isinstance(saved, list | dict) else current


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return _plain(value.item())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
