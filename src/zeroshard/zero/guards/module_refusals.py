"""Refuses uses of a model whose weights are sharded: its own state dicts, `nn.Module.apply`, DDP around it.

Without this file they would be silently wrong. Changes of the model itself are refused by `late_modules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard.zero.guards.late_modules import Known
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.stepping.engine_optimizers import EngineOptimizers

_NO_DDP = (
    "DistributedDataParallel: the model is under Zero(), which averages gradients itself; use the model without it "
    "(stage=0 does what DDP does); under Accelerate, the Trainer or Lightning, take the Accelerator, ZeroTrainer or "
    "ZeroStrategy of zeroshard.integrations, and give it ZeroPlugin(stage=...)"
)


class ModuleRefusals:
    """Refuses until `remove` what the methods of ``model``, and of some of its submodules, would do wrong.

    Which submodules: [Note: Modules with methods of ours] in `module_methods`. What ``apply`` and ``load_state_dict``
    of a submodule write is noticed at the parameters: it counts if it is the same on every rank (`collective_order`),
    and is refused where weights are sharded; so is ``load_state_dict`` where it would round the master weights.

    Args:
        model: the model that the engine has taken over.
        with_methods: its modules that have methods of the engine's.
        runtime: the engine's runtime.
        optimizers: the engine's optimizers.
    """

    def __init__(
        self, model: nn.Module, with_methods: Sequence[nn.Module], runtime: Runtime, optimizers: EngineOptimizers
    ) -> None:
        self._model = model
        self._handles: list[Any] = []
        vars(model)["_ddp_params_and_buffers_to_ignore"] = _RefusesDdp()
        known = Known(model, runtime.root, runtime.units)
        optimizers.require_same_model = known.require_unchanged
        runtime.before_forward = _before_forward(known, set(model.parameters()))
        vars(model)["apply"] = _apply_where_unsharded(model, runtime)
        narrow = any(g.params.is_rounded or g.params.full.dtype != g.params.dtype for g in runtime.groups())
        for module in with_methods:
            self._handles.append(module.register_state_dict_pre_hook(_refuse_state(runtime)))
            if module is model or narrow:
                self._handles.append(module.register_load_state_dict_pre_hook(_refuse_load))
        inside = {part for unit in runtime.units for part in unit.module.modules()}
        rounded = {param for group in runtime.groups() if group.params.is_rounded for param in group.params.params}
        for module in inside.difference(with_methods):  # nothing else tells a reader that values are rounded
            if not rounded.isdisjoint(module.parameters(recurse=False)):
                self._handles.append(module.register_state_dict_pre_hook(_refuse_state(runtime)))

    def remove(self) -> None:
        """Refuse nothing more."""
        for handle in self._handles:
            handle.remove()
        for name in ("_ddp_params_and_buffers_to_ignore", "apply"):
            self._model.__dict__.pop(name, None)


def _refuse_state(runtime: Runtime) -> Callable[[nn.Module, str, bool], None]:
    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not runtime.weights.readable:
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


def _apply_where_unsharded(module: nn.Module, runtime: Runtime) -> Callable[..., nn.Module]:
    """Return a ``module.apply`` that raises on several ranks outside of `pin`: changes would be lost or differ."""

    def apply(fn: Callable[[nn.Module], None]) -> nn.Module:
        if runtime.rank_groups.world.world_size > 1 and not runtime.weights.pinned:
            raise RuntimeError(
                "model.apply(): weights that it changes are sharded, or each rank's own; call it before Zero(), or, "
                "with the same values on every rank, inside zero.full_params(write_back=True)"
            )
        return type(module).apply(module, fn)

    return apply


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
