"""Refuses uses of a model whose weights are sharded: its own state dicts, `nn.Module.apply`, DDP around it.

Without this file they would be silently wrong. So would be changes of which parameters the model has, and where.

The engine gathers a unit's weights while that unit runs, the root unit's while the model runs, and averages and steps
the gradients of the parameters that it was built with. So after `Zero()` a parameter stays in its unit. Before each
forward and each step the model's parameters are compared with those that the engine knows:

| change                                                | what happens                                                |
|-------------------------------------------------------|-------------------------------------------------------------|
| a parameter of the root unit is tied to another's     | may be done                                                 |
| one of another unit is tied to a module outside of it | refused: at stage 3 that module would read NaN              |
| another parameter in its place, new ones, resized ones| refused if they are trained: they would never be stepped    |
| a module is moved, shared, wrapped, or deleted        | may be done; checkpoints have the names that it has then    |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard.host.torch_internals import contents_of, own_parameters
from zeroshard.zero.buffers.unit import FlatUnit
from zeroshard.zero.engine_optimizers import EngineOptimizers
from zeroshard.zero.optimizers.adoption import has_owner
from zeroshard.zero.runtime.runtime import Runtime

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
        runtime: the engine's runtime.
        optimizers: the engine's optimizers.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, optimizers: EngineOptimizers) -> None:
        self._model = model
        self._handles: list[Any] = []
        vars(model)["_ddp_params_and_buffers_to_ignore"] = _RefusesDdp()
        known = Known(model, runtime.root, runtime.units)
        optimizers.require_same_model = known.require_unchanged
        runtime.before_forward = _before_forward(known, set(model.parameters()))
        vars(model)["apply"] = _apply_where_unsharded(model, runtime)
        narrow = any(g.params.is_rounded or g.params.full.dtype != g.params.dtype for g in runtime.groups())
        for module in runtime.outer_modules:
            self._handles.append(module.register_state_dict_pre_hook(_refuse_state(runtime)))
            if module is model or narrow:
                self._handles.append(module.register_load_state_dict_pre_hook(_refuse_load))
        inside = {part for unit in runtime.units for part in unit.module.modules()}
        rounded = {param for group in runtime.groups() if group.params.is_rounded for param in group.params.params}
        for module in inside.difference(runtime.outer_modules):  # nothing else tells a reader that values are rounded
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


class Known:
    """The parameters of a model that has an engine, and the modules that own them; the table above has what it refuses.

    Args:
        model: the model, when its engine is built.
        root, units: the engine's units.
    """

    def __init__(self, model: nn.Module, root: FlatUnit, units: Iterable[FlatUnit]) -> None:
        self._model, self._root = model, root
        self._homes = {param: unit for unit in (root, *units) for _, param, _, _ in unit.named_slots()}
        self._owned = {(module, param) for module in model.modules() for param in own_parameters(module).values()}
        self._modules = list(model.modules())
        self._contents = contents_of(self._modules)
        self._kept = [*self._modules, *model.parameters()]  # so that nothing new can have an address that is compared

    def require_unchanged(self) -> None:
        """Raise RuntimeError for a parameter that came later and is trained, or that was tied outside of its unit."""
        if contents_of(self._modules) == self._contents:  # as nearly always
            return
        for module in self._model.modules():
            for key, param in own_parameters(module).items():
                # functional_call puts other tensors there for the length of a call
                if isinstance(param, nn.Parameter) and (module, param) not in self._owned:
                    self._require_gathered(module, key, param)

    def _require_gathered(self, module: nn.Module, key: str, param: nn.Parameter) -> None:
        unit = self._homes.get(param)
        prefix = next((f"{name}." for name, each in self._model.named_modules() if each is module and name), "")
        if unit is None and param.requires_grad and not has_owner(param):
            raise RuntimeError(
                f"{prefix}{key}: a parameter that comes after Zero() would never be trained, nor be the same on every "
                "rank; put it into the model before, freeze it, or copy its values into the old one inside "
                "zero.full_params(write_back=True)"
            )
        if unit not in (None, self._root) and all(each is not module for each in unit.module.modules()):
            raise RuntimeError(
                f"{prefix}{key}: it was tied after Zero() to a parameter that is gathered for the unit {unit.name} "
                "alone; tie parameters before Zero(), or leave that unit out of Zero(units=...)"
            )
