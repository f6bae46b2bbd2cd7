"""Modules that mixed precision leaves in fp32: which parameters they own, and the casts around their calls.

Some modules lose too much in 16 bits: routers, whose small differences choose experts, or T5's ``wo``, which overflows.
``MixedPrecision(torch.bfloat16, keep_in_fp32_modules=("wo", Router))`` exempts them and all that is in them. Their
parameters compute, are gathered and are reduced in fp32, in flat buffers of their own; and for the modules around them
nothing changes:

    inputs -> fp32 -> the module -> outputs in the dtype of the inputs (in ``param_dtype``, if no input floats)

A part of such a module that others call has the same casts; inside of the module they have nothing to do.

The name is that of `transformers` (``_keep_in_fp32_modules``), the casts are those of FSDP1
(``_module_classes_to_ignore``, torch/distributed/fsdp/_wrap_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.host.errors import nearest_name
from zeroshard.host.torch_internals import own_parameters
from zeroshard.zero.core.hooks import cast, tensors_in
from zeroshard.zero.precision import MixedPrecision


def kept_params(model: nn.Module, precision: MixedPrecision) -> frozenset[Tensor]:
    """The parameters of ``model`` that mixed precision leaves in fp32.

    Raises:
        ValueError: a name or class that no module has; a parameter that is not fp32, or that other modules have, too.
    """
    if not precision.keep_in_fp32_modules:
        return frozenset()
    outermost = _outermost(model, precision.keep_in_fp32_modules)
    inside = {part for module in outermost.values() for part in module.modules()}
    kept = {param for part in inside for param in own_parameters(part).values() if param is not None}
    for name, module in model.named_modules():
        for own, param in own_parameters(module).items():
            if param is None or param not in kept:
                continue
            path = f"{name}.{own}".lstrip(".")
            if module not in inside:
                raise ValueError(f"keep_in_fp32_modules: {path} is tied to a parameter of another module; keep both")
            if param.is_floating_point() and param.dtype != torch.float32:
                raise ValueError(f"keep_in_fp32_modules: {path} is {param.dtype}; make the model in torch.float32")
    return frozenset(kept)


def cast_around(model: nn.Module, precision: MixedPrecision) -> list[Any]:
    """Cast what goes into the kept modules and what comes out; returns removable handles."""
    dtype = precision.param_dtype
    if dtype is None or dtype == torch.float32:
        return []
    outermost = _outermost(model, precision.keep_in_fp32_modules).values()
    parts = [part for module in outermost for part in module.modules() if part is module or own_parameters(part)]
    casts = [(part, _Casts(dtype if part in outermost else torch.float32)) for part in parts]
    before = [module.register_forward_pre_hook(each.before, with_kwargs=True) for module, each in casts]
    return [*before, *(module.register_forward_hook(each.after) for module, each in casts)]


class _Casts:
    """The casts around one module, whose outputs get ``dtype`` if none of its inputs floats."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = self._given = dtype

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cast inputs to fp32."""
        floating = [each.dtype for each in tensors_in((args, kwargs)) if each.is_floating_point()]
        others = [each for each in floating if each != torch.float32]
        self._given = others[0] if others else torch.float32 if floating else self._dtype
        return cast(args, torch.float32), cast(kwargs, torch.float32)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cast outputs back."""
        return cast(output, self._given)


def _outermost(model: nn.Module, chosen: Iterable[str | type[nn.Module]]) -> dict[str, nn.Module]:
    """The modules that are chosen, but for those inside of others, by their names in the model."""
    named = {name: module for name, module in model.named_modules() if module is not model}
    found: dict[str, nn.Module] = {}
    for each in chosen:
        new = {name: module for name, module in named.items() if _is_meant(each, name, module)}
        if not new:
            what = each if isinstance(each, str) else each.__name__
            known = chain.from_iterable((type(module).__name__, name.split(".")[-1]) for name, module in named.items())
            close = nearest_name(what, sorted(set(known)))
            meant = f"did you mean {close}?" if close else "name a class, a path in the model, or the end of one"
            raise ValueError(f"keep_in_fp32_modules: no module of the model is a {what!r} or called so; {meant}")
        found |= new
    inside = {part for module in found.values() for part in module.modules() if part is not module}
    return {name: module for name, module in found.items() if module not in inside}


def _is_meant(chosen: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(chosen, type):
        return isinstance(module, chosen)
    return chosen == type(module).__name__ or f".{name}".endswith(f".{chosen}")
