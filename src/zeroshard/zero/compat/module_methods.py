"""Replaces methods of `nn.Module` that would be wrong on sharded weights by methods that are right.

Users keep calling the model as an ordinary module. Most methods work unchanged; this file handles the others, and
those that cannot be right are refused (`zeroshard.zero.guards.module_refusals`).

[Note: Modules with methods of ours]
    The model and the units' modules have them, and modules outside of the units that own parameters. A module inside of
    a unit keeps its own, because what they do to parameters is noticed there: a read of sharded weights warns, a write
    to them raises, a write to current ones counts as `flat_params` says, and a ``.data`` of another dtype or device
    is refused (`param_changes`). Only its `state_dict` is refused where weights are rounded to a wire format, which no
    value shows. `EngineHook` refuses copies of any module that the engine has hooked.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.host.torch_internals import own_buffers, own_parameters
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.engine_optimizers import EngineOptimizers
from zeroshard.zero.optimizers.adoption import has_owner
from zeroshard.zero.runtime.runtime import Runtime

_modules_of_engines: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def has_engine(model: nn.Module) -> bool:
    """Whether the model, a submodule, or a parameter that it shares with another model has an engine already."""
    owned = any(module in _modules_of_engines for module in model.modules())
    return owned or any(has_owner(param) for param in model.parameters())


class ModulePatches:
    """Replaces methods of ``model`` and some of its submodules until `remove`: [Note: Modules with methods of ours].

    Args:
        model: the model that the engine has taken over.
        runtime: the engine's runtime.
        optimizers: the engine's optimizers.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, optimizers: EngineOptimizers) -> None:
        self._model, self._modules = model, list(model.modules())
        _modules_of_engines.update(self._modules)
        for module in runtime.outer_modules:
            vars(module)["_apply"] = _apply_in_place(module)
        for module in model.modules():
            own = getattr(type(module), "generate", None)
            if callable(own) and "synced_gpus" in inspect.signature(own).parameters:
                vars(module)["generate"] = _generate_together(module, runtime)
        vars(model)["zero_grad"] = uncompiled(
            lambda set_to_none=True: optimizers.clear_grads(None, set_to_none=set_to_none)
        )

    def remove(self) -> None:
        """Restore the original methods, and let the model have another engine."""
        self._model.__dict__.pop("zero_grad", None)
        for module in self._model.modules():
            for name in ("_apply", "generate"):
                module.__dict__.pop(name, None)
        _modules_of_engines.difference_update([*self._modules, *self._model.modules()])


def _apply_in_place(module: nn.Module) -> Callable[..., nn.Module]:
    """Return a ``module._apply`` for functions that would not change parameters; it applies them to buffers only."""

    def apply(fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        own = (param for part in module.modules() for param in own_parameters(part).values() if param is not None)
        kinds = {(param.dtype, param.device, min(param.dim(), 5)) for param in own}
        for dtype, device, num_dims in kinds:
            # Try it on a small tensor of the same kind: on the parameters it might copy the whole model.
            probe = torch.arange(1, 1 + 2**num_dims, device=device).to(dtype).view([2] * num_dims)
            _require_in_place(probe, fn(probe))
        for part in module.modules():
            for name, buffer in own_buffers(part).items():
                if buffer is not None:
                    own_buffers(part)[name] = fn(buffer)
        return module

    return apply


def _require_in_place(probe: Tensor, found: Tensor) -> None:
    """Raise RuntimeError unless ``found`` has the dtype, device, strides and values of ``probe``; it may be a copy."""
    if found is probe:
        return
    if found.dtype != probe.dtype:
        what = f"to {found.dtype}: their dtype is {probe.dtype}"
    elif found.device.type != probe.device.type or (found.device.index or 0) != (probe.device.index or 0):
        what = f"to {found.device}: they are on {probe.device}"
    elif found.stride() != probe.stride():
        what = "to another memory format"
    elif not torch.equal(found, probe):
        what = "to empty ones (to_empty())"
    else:
        return
    raise RuntimeError(
        f"model: the engine's buffers hold its parameters, so neither it nor a part of it can be moved {what}; "
        "do it before Zero(), or give Zero() a device or a MixedPrecision"
    )


def _generate_together(model: nn.Module, runtime: Runtime) -> Callable[..., Any]:
    """Return ``generate`` of a transformers model with ``synced_gpus``: ranks that are done join others' gathers."""

    def generate(*args: Any, **kwargs: Any) -> Any:
        if runtime.shard_params and runtime.rank_groups.shard_group.world_size > 1 and not runtime.weights.pinned:
            if not (dist.is_available() and dist.is_initialized()):
                raise RuntimeError(
                    "model.generate(): the weights are sharded, and ranks end at different tokens; "
                    "call it inside zero.full_params()"
                )
            kwargs["synced_gpus"] = True
        kind: Any = type(model)
        return kind.generate(model, *args, **kwargs)

    return generate
