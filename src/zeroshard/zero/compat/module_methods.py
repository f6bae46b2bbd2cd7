"""Replaces methods of `nn.Module` that would be silently wrong on sharded weights; some of them raise a clear error.

Users keep calling the model as an ordinary module. Most methods work unchanged; this file handles the others.

[Note: Modules with methods of ours]
    The model and the units' modules have them, and modules outside of the units that own parameters. A module inside of
    a unit keeps its own, because what they do to parameters is noticed there: a read of sharded weights warns, a write
    to them raises, a write to current ones counts as `written_weights` says, and a ``.data`` of another dtype or device
    is refused (`param_changes`). Only its `state_dict` is refused where weights are rounded to a wire format, which no
    value shows. `EngineHook` refuses copies of any module that the engine has hooked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard.torch_internals import own_buffers, own_parameters
from zeroshard.uncompiled import uncompiled
from zeroshard.zero.compat.late_modules import Known
from zeroshard.zero.runtime.module_hooks import attach_parts
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.stepping.engine_optimizers import EngineOptimizers

_NO_DDP = (
    "DistributedDataParallel: the model is under Zero(), which averages gradients itself; use the model without it "
    "(stage=0 does what DDP does); under Accelerate, the Trainer or Lightning, take the Accelerator, ZeroTrainer or "
    "ZeroStrategy of zeroshard.integrations, and give it ZeroPlugin(stage=...)"
)


class ModulePatches:
    """Replaces methods of ``model`` and some of its submodules until `remove`: [Note: Modules with methods of ours].

    Args:
        model: the model that the engine has taken over.
        runtime: the engine's runtime.
        optimizers: the engine's optimizers.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, optimizers: EngineOptimizers) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._on_model = {
            "zero_grad": uncompiled(lambda set_to_none=True: optimizers.clear_grads(None, set_to_none=set_to_none)),
            "_ddp_params_and_buffers_to_ignore": _RefusesDdp(),
        }
        model.__dict__.update(self._on_model)
        self._known = Known(model, runtime.root, runtime.units)
        optimizers.require_same_model = self._known.require_unchanged
        runtime.before_forward = _before_forward(self._known, set(model.parameters()))
        of_units = [unit.module for unit in runtime.all_units()]
        inside = {part for unit in runtime.units for part in unit.module.modules()}
        others = (part for part in model.modules() if part not in inside and [*part.parameters(recurse=False)])
        for module in of_units:
            vars(module)["apply"] = _apply_where_unsharded(module, runtime)
        for module in dict.fromkeys([*of_units, *others]):
            vars(module)["_apply"] = _apply_in_place(module)
            self._handles.append(module.register_state_dict_pre_hook(_refuse_state(runtime)))
            self._handles.append(module.register_load_state_dict_pre_hook(_refuse_load))
        rounded = {param for group in runtime.groups() if group.params.is_rounded for param in group.params.params}
        for module in inside.difference(of_units):  # nothing but this refusal tells a reader that values are rounded
            if not rounded.isdisjoint(module.parameters(recurse=False)):
                self._handles.append(module.register_state_dict_pre_hook(_refuse_state(runtime)))
        for module in model.modules():
            if "synced_gpus" in _words_of(getattr(type(module), "generate", None)):
                vars(module)["generate"] = _generate_together(module, runtime)
        computes_otherwise = any(group.params.full.dtype != group.params.dtype for group in runtime.groups())
        # Else weights are always unsharded and current.
        if runtime.rank_groups.shard_group.world_size > 1 or computes_otherwise:
            self._handles += attach_parts(runtime.all_units(), model, runtime.pre_forward_of_part)

    def remove(self) -> None:
        """Restore the original methods."""
        for handle in self._handles:
            handle.remove()
        for name in self._on_model:
            self._model.__dict__.pop(name, None)
        for module in self._model.modules():
            for name in ("_apply", "apply", "generate"):
                module.__dict__.pop(name, None)
        self._known.forget()


def _refuse_state(runtime: Runtime) -> Callable[[nn.Module, str, bool], None]:
    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not runtime.weights_readable:
            raise RuntimeError(
                "model.state_dict(): the weights are sharded or older than the last step; "
                "use zero.state_dict(), or call it inside zero.full_params()"
            )
        rounded = {param for group in runtime.groups() if group.params.is_rounded for param in group.params.params}
        if not rounded.isdisjoint(module.parameters()):
            raise RuntimeError(
                "model.state_dict(): the compute weights are rounded to the wire format (MixedPrecision(gather=)); "
                "use zero.state_dict(), which has the master weights"
            )

    return refuse


def _refuse_load(*_: Any) -> None:
    raise RuntimeError("model.load_state_dict(): the weights are sharded; use zero.load_state_dict()")


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


def _apply_where_unsharded(module: nn.Module, runtime: Runtime) -> Callable[..., nn.Module]:
    """Return a ``module.apply`` that raises on several ranks outside of `pinned`: changes would be lost or differ."""

    def apply(fn: Callable[[nn.Module], None]) -> nn.Module:
        if runtime.rank_groups.world.world_size > 1 and not runtime.is_pinned:
            raise RuntimeError(
                "model.apply(): weights that it changes are sharded, or each rank's own; call it before Zero(), or, "
                "with the same values on every rank, inside zero.full_params(write_back=True)"
            )
        return type(module).apply(module, fn)

    return apply


def _words_of(function: Any) -> Iterable[str]:
    return inspect.signature(function).parameters if callable(function) else ()


def _generate_together(model: nn.Module, runtime: Runtime) -> Callable[..., Any]:
    """Return ``generate`` of a transformers model with ``synced_gpus``: ranks that are done join others' gathers."""

    def generate(*args: Any, **kwargs: Any) -> Any:
        if runtime.shard_params and not runtime.is_pinned:
            if not (dist.is_available() and dist.is_initialized()):
                raise RuntimeError(
                    "model.generate(): the weights are sharded, and ranks end at different tokens; "
                    "call it inside zero.full_params()"
                )
            kwargs["synced_gpus"] = True
        kind: Any = type(model)
        return kind.generate(model, *args, **kwargs)

    return generate


class _RefusesDdp:
    """Raises when `DistributedDataParallel` reads the model's list of parameters to ignore, which it does first."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(_NO_DDP)


def _before_forward(known: Known, params: set[nn.Parameter]) -> Callable[[], None]:
    def before() -> None:
        around = DistributedDataParallel._active_ddp_module
        if around is not None and not params.isdisjoint(around.parameters()):
            raise RuntimeError(_NO_DDP)
        known.require_unchanged()

    return before
