"""The table of state formats, and the table that says which states of torch's classes may be kept in one.

The class computes in its parameters' dtype as ever: states are decoded for a step and encoded after it.

| format | a state ``exp_avg`` is kept as                                         | bytes an element |
|--------|------------------------------------------------------------------------|------------------|
| fp32   | ``exp_avg``                                                            | 4                |
| bf16   | ``exp_avg`` (bfloat16)                                                 | 2                |
| int8   | ``exp_avg_codes`` (int8), ``exp_avg_scales`` (fp32, one for each block) | 1 + 4 / 256      |

Blocks are counted from each parameter's first element, and `zeroshard.Zero` cuts parameters only where a block ends.
What is kept in fewer bits is rounded at random: [Note: Slow moments] in `random_rounding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from zeroshard.kernels.state_codes import CODE_OF, CODES, SCALES, Code
from zeroshard.optim.classes.reach import OF_TORCH, Reach

BLOCK = 256


_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
STATES: dict[type[Optimizer], tuple[str, ...]] = {
    **dict.fromkeys((optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam), _ADAM),
    optim.Adamax: ("exp_avg", "exp_inf"),
    optim.SGD: ("momentum_buffer",),
    optim.RMSprop: ("square_avg", "momentum_buffer"),
    optim.Adagrad: ("sum",),
    optim.Adadelta: ("square_avg", "acc_delta"),
}
"""The states of each class that are as large as the parameter; `CODE_OF` says which codes each of them has."""

MOST_MOMENTUM = 0.9
"""SGD counts no steps, so its states are rounded to the nearest code. A momentum that decays more slowly than by half a
spacing of the codes would not decay."""


@dataclass(frozen=True)
class StateFormat:
    """How a state is kept between steps."""

    name: str
    kept: Mapping[str, torch.dtype]  # the tensors of a state: what follows its name, and their dtypes
    block: int = 1  # elements that no piece of a parameter cuts; tensors named ``..._scales`` have one of each
    as_small: tuple[torch.dtype, ...] = ()  # dtypes of parameters whose states need as few bytes: they stay

    def made(self, like: Tensor) -> list[Tensor]:
        """Return uninitialised tensors for a state of this shape."""
        num_blocks = -(-like.numel() // self.block)
        shapes = ((num_blocks,) if name == SCALES else like.shape for name in self.kept)
        pairs = zip(shapes, self.kept.values(), strict=True)
        return [torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in pairs]

    def blocks(
        self, optimizer_cls: type, settings: Mapping[str, Any], params: Mapping[nn.Parameter, torch.dtype]
    ) -> dict[nn.Parameter, int]:
        """Those of a param group's parameters that may not be cut anywhere, with the elements of a block of each.

        Raises:
            ValueError: with these settings, or for parameters of these dtypes, states cannot be kept so.
        """
        if why := self._obstacle(optimizer_cls, settings, set(params.values())):
            name = optimizer_cls.__name__
            raise ValueError(f"state_format: {name} cannot keep its states in {self.name}: {why}; use 'fp32'")
        return dict.fromkeys(params, self.block) if self.block > 1 else {}

    def _obstacle(self, optimizer_cls: type, settings: Mapping[str, Any], dtypes: set[torch.dtype]) -> str:
        others = dtypes - {torch.float32, *self.as_small}
        momentum = settings.get("momentum", 0)
        if others:
            return f"a parameter is {sorted(map(str, others))[0]}, and it is for states of torch.float32"
        if settings.get("centered"):
            return "centered=True subtracts two of them, and what rounding leaves may be negative"
        if optimizer_cls is optim.SGD and self.block > 1 and momentum > MOST_MOMENTUM:
            return f"momentum={momentum} decays by less than a spacing of their codes; lower it to 0.9, or take 'bf16'"
        return ""

    def code_of(self, kind: str) -> Code | None:
        """Which codes a state is kept in; None: in none."""
        return CODE_OF[kind] if SCALES in self.kept else None

    def num_bytes(self, numel: int) -> int:
        """Bytes of a state of so many elements."""
        return sum(
            (-(-numel // self.block) if name == SCALES else numel) * dtype.itemsize for name, dtype in self.kept.items()
        )


_BF16 = StateFormat("bf16", {"": torch.bfloat16}, as_small=(torch.bfloat16, torch.float16))
_INT8 = StateFormat("int8", {CODES: torch.int8, SCALES: torch.float32}, BLOCK)
FORMATS: dict[str, StateFormat | None] = {"fp32": None, "bf16": _BF16, "int8": _INT8}


def format_of(optimizer_cls: type[Optimizer], name: str) -> StateFormat | None:
    """Return the format of this name, a key of `FORMATS`; None: states stay as the class makes them.

    Raises:
        ValueError: there is no such format, or the class cannot keep its states in it.
    """
    if name not in FORMATS:
        *others, last = map(repr, FORMATS)
        raise ValueError(f"state_format: {name!r} is no format; use {', '.join(others)} or {last}")
    found = FORMATS[name]
    if found is not None and optimizer_cls not in STATES:
        kind = OF_TORCH.get(optimizer_cls)
        if kind is None:
            why = "it is no class of torch.optim, so it may count its steps, and cannot be run unit by unit"
        elif kind.reach is not Reach.ELEMENT_WISE:
            why = kind.reason
        else:  # an average of weights (ASGD), and signs with step sizes (Rprop)
            why = "its states are no moments of gradients"
        name_of_class = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
        raise ValueError(f"state_format: {name_of_class} cannot keep its states in {name}: {why}; use 'fp32'")
    return found
