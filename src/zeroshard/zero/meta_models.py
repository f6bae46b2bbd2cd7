"""Models on the meta device, whose parameters have no memory: what fills them, and placeholders until it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zeroshard.host.torch_internals import not_saved, own_buffers, own_parameters, version_of

Init = Callable[[str, torch.Tensor], None]


@runtime_checkable
class DrawsParts(Protocol):
    """An `Init` that can also fill a part of a parameter, so that each rank draws only its own shard."""

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Fill an entire buffer or parameter, in place."""

    def part(self, name: str, values: torch.Tensor, start: int, numel: int) -> None:
        """Fill ``values [n]``: the elements from ``start`` of a flattened parameter of ``numel`` elements.

        The values must depend neither on the rank nor on how many elements one call fills.
        """


def materialise(model: nn.Module, device: torch.device, init: Init | None = None) -> set[nn.Parameter]:
    """Replace parameters on the meta device by placeholders without memory, and buffers on it by filled ones.

    Each placeholder is one NaN expanded to the parameter's shape, so a model too large for this rank can be filled
    unit by unit. Buffers are small, and ``init(name, tensor)`` fills them at once.

    Returns:
        The new parameters.

    Raises:
        ValueError: a buffer is on the meta device, and ``init`` does not fill it.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    filled: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for key, param in list(own_parameters(module).items()):
            if param is None or not param.is_meta:
                continue
            if param not in made:
                nothing = torch.full((), float("nan"), dtype=param.dtype, device=device).expand(param.shape)
                made[param] = nn.Parameter(nothing, requires_grad=param.requires_grad)
            own_parameters(module)[key] = made[param]
        for key, buffer in list(own_buffers(module).items()):
            if buffer is not None and buffer.is_meta:
                if buffer not in filled:
                    name = f"{prefix}.{key}" if prefix else key
                    filled[buffer] = _filled(name, buffer, device, init)
                    if key in not_saved(module) and filled[buffer].isnan().any():  # no checkpoint will fill it
                        what = "the buffer is on the meta device, and `init` left NaN in it"
                        raise ValueError(f"{name}: {what}; {_TODO}")
                own_buffers(module)[key] = filled[buffer]
    return set(made.values())


_TODO = "have `init` fill it, or build buffers on a real device"


def _filled(name: str, buffer: torch.Tensor, device: torch.device, init: Init | None) -> torch.Tensor:
    if init is None:
        raise ValueError(f"{name}: the buffer is on the meta device; {_TODO}")
    made = torch.empty_like(buffer, device=device)
    if made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    version = version_of(made)
    try:
        with torch.no_grad():
            init(name, made)
    except LookupError as error:
        raise ValueError(f"{name}: the buffer is on the meta device, and `init` does not know it; {_TODO}") from error
    if version_of(made) == version:
        raise ValueError(f"{name}: the buffer is on the meta device, and `init` left it as it was; {_TODO}")
    return made


def loaded_later(name: str, param: Tensor) -> None:
    """An `Init` for weights that a checkpoint will load: nothing is drawn or sent, and they are NaN until then."""
    param.detach().fill_(float("nan") if param.is_floating_point() else 0)
