"""Refuses changes of which parameters a model has, and where, that an engine built before them cannot follow.

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

from collections.abc import Iterable

from torch import nn

from zeroshard.host.torch_internals import contents_of, own_parameters
from zeroshard.zero.buffers.unit import FlatUnit
from zeroshard.zero.optimizers.adoption import has_owner


class Known:
    """The parameters of a model that has an engine, and the modules that own them.

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
