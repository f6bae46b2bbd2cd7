"""Let `transformers` build a model without allocating its parameters, and record how it would initialize them.

The constructor runs on the CPU. Each parameter moves to the meta device as soon as a module registers it, so only one
parameter at a time has (untouched) memory. Buffers, such as rotary wavelengths, get their values. Calls that would fill
a parameter are not executed but recorded: each parameter gets a `Rule`, from which every rank later draws its shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from zeroshard.host.errors import UserError
from zeroshard.models.base import Part, fill_constant_, fill_drawn_

_BUILDING = threading.RLock()  # a constructor changes settings of the whole process, such as torch's default dtype


@dataclass(frozen=True)
class Rule:
    """How one parameter is initialized."""

    # ``constant``, ``normal``, ``uniform``, ``trunc_normal``, ``given`` (a tensor), or the name of a function of torch
    # that is none of these and cannot be drawn; empty if the constructor called none
    kind: str
    # parameters of the first four, in this order: value; mean, std; low, high; mean, std, low, high
    numbers: tuple[float, ...] = ()
    values: Tensor | None = None  # the tensor of ``given``

    def fill(self, param: Tensor, seed: int, name: str, part: Part | None) -> None:
        """Write initial values; arguments as in `zeroshard.models.base.LanguageModel.init_parameter`.

        Raises:
            UserError: values of this ``kind`` cannot be drawn in parts, because they depend on each other.
        """
        numbers = self.numbers
        if self.kind == "constant":
            fill_constant_(param, numbers[0])
        elif self.kind == "given":
            assert self.values is not None
            start = part.start if part else 0
            with torch.no_grad():
                param.view(-1).copy_(self.values.reshape(-1)[start : start + param.numel()])
        elif self.kind in _DRAWN:
            draw = _DRAWN[self.kind]
            fill_drawn_(param, lambda drawn, generator: draw(drawn, numbers, generator), seed, name, part)
        else:
            what = f"{name} is initialised by {self.kind or 'nothing'}, which cannot be drawn in parts"
            raise UserError("model.from_config", what, "train from weights")


_DRAWN: dict[str, Callable[[Tensor, tuple[float, ...], torch.Generator], object]] = {
    "normal": lambda drawn, numbers, generator: drawn.normal_(*numbers, generator=generator),
    "uniform": lambda drawn, numbers, generator: drawn.uniform_(*numbers, generator=generator),
    "trunc_normal": lambda drawn, numbers, generator: nn.init.trunc_normal_(drawn, *numbers, generator=generator),
}


def built_without_values(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Rule]]:
    """Call ``build``; return its module (parameters on meta, buffers on the CPU) and each parameter's rule by name."""
    with _BUILDING, _Recorded() as recorded, _parameters_on_meta(), torch.device("cpu"):
        made = build()
    return made, {name: recorded.rules.get(param, Rule("")) for name, param in made.named_parameters()}


@contextmanager
def _parameters_on_meta() -> Generator[None]:
    me = threading.get_ident()

    def moved(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta or threading.get_ident() != me:
            return None
        made = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        made.__dict__.update(param.__dict__)
        return made

    hook = register_module_parameter_registration_hook(moved)  # ty: ignore[invalid-argument-type]
    try:
        yield
    finally:
        hook.remove()


@dataclass
class _Recorded(TorchFunctionMode):
    """Records how parameters on the meta device are filled; the last call for a parameter counts."""

    rules: dict[nn.Parameter, Rule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        of_init = getattr(func, "__module__", "") == "torch.nn.init"
        target = kwargs.get("tensor", args[0] if args else None)
        name = getattr(func, "__name__", "")
        if of_init and not (isinstance(target, nn.Parameter) and target.is_meta):
            if isinstance(target, nn.Parameter) or (isinstance(target, Tensor) and target.is_meta):
                return target  # a parameter that is not registered yet, or a part of one: its values are never read
            return func(*args, **kwargs)
        if not isinstance(target, nn.Parameter) or not target.is_meta:
            return func(*args, **kwargs)
        if func == _READS_DATA:
            return target  # a write to `param.data` counts as a write to the parameter
        if of_init or name in _IN_PLACE:
            self.rules[target] = _rule(name, args[1:], kwargs, target)
            return target
        return func(*args, **kwargs)


_TENSOR: Any = Tensor
_READS_DATA = _TENSOR.data.__get__
_IN_PLACE = {"fill_", "zero_", "normal_", "uniform_", "copy_"}
# Arguments of each function after the tensor, with their defaults.
_SIGNATURES: dict[str, tuple[tuple[str, float], ...]] = {
    "normal_": (("mean", 0.0), ("std", 1.0)),
    "trunc_normal_": (("mean", 0.0), ("std", 1.0), ("a", -2.0), ("b", 2.0)),
}


def _rule(name: str, rest: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor) -> Rule:
    if name in _SIGNATURES:
        numbers = [kwargs.get(key, default) for key, default in _SIGNATURES[name]]
        numbers[: len(rest)] = rest[: len(numbers)]
        return Rule(name.rstrip("_"), tuple(map(float, numbers)))
    if name == "uniform_":
        low = kwargs.get("a", kwargs.get("from", rest[0] if rest else 0.0))
        high = kwargs.get("b", kwargs.get("to", rest[1] if rest[1:] else 1.0))
        return Rule("uniform", (float(low), float(high)))
    if name in ("fill_", "constant_"):
        return Rule("constant", (float(rest[0] if rest else kwargs.get("val", kwargs.get("value"))),))
    if name == "zero_":
        return Rule("constant", (0.0,))
    if name == "copy_" and rest and isinstance(rest[0], Tensor) and not rest[0].is_meta:
        return Rule("given", values=rest[0].detach().expand(target.shape).clone())
    if name in ("kaiming_uniform_", "xavier_uniform_") and target.dim() >= 2:
        fan_in = target[0].numel()
        if name == "kaiming_uniform_" and kwargs.get("nonlinearity", "leaky_relu") == "leaky_relu":
            slope = float(kwargs.get("a", rest[0] if rest else 0.0))
            bound = sqrt(6.0 / ((1 + slope**2) * fan_in))
            return Rule("uniform", (-bound, bound))
    return Rule(name)
