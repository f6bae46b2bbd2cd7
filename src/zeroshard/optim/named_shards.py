"""The interface between checkpoints and the engine: one-dimensional pieces of flattened tensors, by the model's names.

Every sharding strategy saves and loads such pieces, so a checkpoint of one stage and world size can be loaded at
another: the engine asks for an interval of a tensor, never for a rank's file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.host.errors import UserError
from zeroshard.host.torch_internals import not_saved, own_buffers, own_parameters

# Kinds of state that replicas with local steps have beside their weights: see `zeroshard.zero.local_steps.checkpoints`.
OUTER_KINDS = frozenset({"global", "outer_momentum", "outer_steps"})
ROUNDING = "rounding_step"  # the step for which gradients in a wire format are rounded next
FROZEN = "frozen_digest"  # of a frozen parameter that is kept as codes, in place of its values
# Every other kind is a state of an optimizer.
MODEL_KINDS = frozenset({"param", "buffer", "ema", ROUNDING, FROZEN}) | OUTER_KINDS
SCALAR_KINDS = frozenset({ROUNDING, FROZEN, "outer_steps"})  # those of `MODEL_KINDS` of one number
_REPLICA = "@replica"  # part of the name of state that only one replica has
_OPTIMIZER = "@optimizer"  # part of the name of state of no parameter


def of_replica(name: str, number: int) -> str:
    """Return the name under which a checkpoint has state of the parameter that only replica ``number`` has."""
    return f"{name}{_REPLICA}{number}"


def is_of_replica(name: str) -> bool:
    """Whether `of_replica` made the name."""
    return _REPLICA in name


def of_optimizer(number: int) -> str:
    """Return the name under which a checkpoint has what optimizer ``number`` keeps of no parameter."""
    return f"{_OPTIMIZER}{number}"


def is_of_optimizer(name: str) -> bool:
    """Whether `of_optimizer` made the name."""
    return name.startswith(_OPTIMIZER)


@dataclass(frozen=True)
class NamedShard:
    """A 1-D piece of a flattened tensor."""

    name: str  # the parameter's or buffer's name in ``model.state_dict()``; a tied parameter has its first name
    kind: str  # one of `MODEL_KINDS`, or the optimizer's own name of a state (``"exp_avg"``, ``"step"``)
    shape: tuple[int, ...]  # shape of the unsharded tensor; ``()`` for a scalar state
    interval: tuple[int, int]  # ``[start, stop)`` in elements of the flattened, unsharded tensor
    tensor: Tensor  # ``[stop - start]``, any dtype; shares the engine's memory, so copy it before the next step


class ShardReader(Protocol):
    """Random access to saved tensors by interval."""

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Return every saved kind of ``name`` with the unsharded tensor's shape; empty if nothing was saved."""

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        """Return the piece ``[start, stop)`` of the flattened tensor: 1-D, on the CPU; the caller may change it."""


@runtime_checkable
class ReadsSettings(Protocol):
    """A reader that also knows the settings of the saved optimizers, which the load restores afterwards."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The saved param groups, as `named_group` made them."""


def saved_settings(reader: ShardReader, names: Iterable[str]) -> Mapping[str, Any] | None:
    """Return the saved param group of exactly these parameters, if the load restores settings and there is one."""
    members = frozenset(names)
    groups = reader.param_groups if isinstance(reader, ReadsSettings) else ()
    return next((group for group in groups if frozenset(group["params"]) == members), None)


def saved_dtype(reader: ShardReader, name: str, kind: str) -> torch.dtype:
    """Return the dtype with which ``kind`` of ``name`` was saved."""
    return reader.read(name, kind, (0, 0)).dtype


def require_shape(reader: ShardReader, name: str, kind: str, shape: tuple[int, ...]) -> None:
    """Raise UserError unless ``name`` was saved with this shape: a smaller one would load a part of a larger one."""
    saved = reader.kinds(name).get(kind)
    if saved == shape:
        return
    what = f"{'' if kind == 'param' else f'{kind} '}saved with shape {saved}, the model's is {shape}"
    if saved is None:
        what = f"the checkpoint has no {kind} of it"
    raise UserError(name, what, "load it into the model that it was saved from")


def read_whole(reader: ShardReader, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Return the unsharded tensor on the CPU; raise UserError if it was saved with another shape, or not at all."""
    require_shape(reader, name, kind, shape)
    return reader.read(name, kind, (0, prod(shape))).view(shape)


def tied_names(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each further name of a tensor that has several to its first name, under which a checkpoint has it."""
    first: dict[int, str] = {}
    return {name: known for name, tensor in named.items() if (known := first.setdefault(id(tensor), name)) != name}


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Return every entry of ``model.state_dict()`` as the live tensor, without running its hooks."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in own_parameters(module).items():
            if param is not None:
                found[dot + name] = param
        for name, buffer in own_buffers(module).items():
            if buffer is not None and name not in not_saved(module):
                found[dot + name] = buffer
    return found


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are part of the module's state, by name; a shared buffer once."""
    names: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None and name not in not_saved(module):
                names.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
    return {name: buffer for buffer, name in names.items()}


def named_group(group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's param group as JSON can hold it: its settings, and the names of its ``params``.

    A tensor of one element becomes a number; a value that JSON cannot represent becomes its ``repr``.
    """
    return {**{key: _plain(value) for key, value in group.items() if key != "params"}, "params": list(names)}


def named_groups(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return `named_group` of each param group of an optimizer; ``params``: all that it updates, by name."""
    return [named_group(group, names) for group, names in _with_names(optimizer, params)]


def restore_groups(optimizer: Optimizer, params: Mapping[str, Tensor], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restore the settings that `named_groups` returned: see `restore_settings`."""
    groups = _with_names(optimizer, params)
    restore_settings([group for group, _ in groups], [names for _, names in groups], saved)


def _with_names(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[tuple[dict[str, Any], list[str]]]:
    names = {id(param): name for name, param in params.items()}
    return [(group, [names[id(param)] for param in group["params"]]) for group in optimizer.param_groups]


# Settings that choose an implementation, not a result: they suit the machine that saved, maybe not the one that loads.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Settings by which states are laid out: saved ones are encoded in the blocks of those that load them.
LAYOUT = frozenset({"block"})
_OF_SCHEDULERS = frozenset({"initial_lr"})  # a scheduler that resumes requires it


def restore_settings(
    groups: Sequence[dict[str, Any]],
    names: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    gained: Callable[[int], Mapping[str, Any]] = lambda index: {},
) -> None:
    """Restore to param groups the settings that `named_group` recorded, as ``optimizer.load_state_dict`` does.

    Each group takes the settings of the saved group with the same parameters, except those that choose kernels
    (``foreach``, ``fused``, ``capturable``) or the ``block`` of 8-bit states. A group without such a counterpart keeps
    its settings, with a warning.

    Args:
        groups: param groups of an optimizer; changed in place.
        names: names of each group's parameters.
        saved: groups as `named_group` returned them.
        gained: settings, with a value of each, that the steps of a group's class add to it: a count of steps, say. It
            is called for a group with fewer than were saved, by its index.
    """
    by_members = {frozenset(group["params"]): group for group in saved}
    for index, (group, members) in enumerate(zip(groups, names, strict=True)):
        found = by_members.get(frozenset(members))
        if found is None and saved:
            warnings.warn(
                f"load: no saved param group has the parameters of the one with {members[0] if members else 'none'}; "
                "it keeps its lr and other settings",
                stacklevel=3,
            )
        found = found or {}
        more = gained(index) if group.keys() < found.keys() | {"params", "param_names"} else {}
        group.update(after_restoring({**more, **group}, found))


def after_restoring(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group that `restore_settings` changes, with their new values."""
    return {
        key: _restored(group.get(key), value)
        for key, value in saved.items()
        if key not in _IMPLEMENTATION | LAYOUT and key != "params" and (key in group or key in _OF_SCHEDULERS)
    }


def _restored(current: Any, saved: Any) -> Any:
    """Return ``saved`` in the type of ``current``; ``current`` itself if JSON could not hold such a value."""
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
