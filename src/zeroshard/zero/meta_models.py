"""Models on the meta device, whose parameters have no memory: placeholders, and what fills them, or a rank's shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zeroshard.comm import labelled
from zeroshard.host.torch_internals import not_saved, own_buffers, own_parameters, version_of
from zeroshard.zero.core.weights import Weights, broadcast_values

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


def initial_values(weights: Weights, flat: Tensor, init: Init | None, dtype: torch.dtype) -> Tensor:
    """Return ``flat [padded_numel]`` with its initial values, in ``dtype``. Collective.

    If weights are sharded, other ranks' shards may be left without values.

    Args:
        weights: the weights that are being made.
        flat: an uninitialised buffer in the parameters' own dtype.
        init: function that draws the values; None: the parameters have values, and rank 0's are broadcast.
        dtype: the dtype of the master weights.
    """
    if init is None:
        broadcast_values(weights, flat)
    elif isinstance(init, DrawsParts):
        _draw_own(weights, flat, init)
    else:
        _draw(weights, flat, init)
    return flat.to(dtype)


def _draw(weights: Weights, flat: Tensor, init: Init) -> None:
    """Draw all values on rank 0, and broadcast them; those that are `loaded_later` are filled on each rank."""
    world = weights.rank_groups.world
    if init is loaded_later or world.rank == 0:
        with torch.no_grad():
            for slot, view in zip(weights.layout.slots, weights.layout.views(flat), strict=True):
                init(slot.name, view)
    if init is not loaded_later:
        with labelled(f"{weights.name}/start"):
            world.broadcast(flat, src=0).wait()


def _draw_own(weights: Weights, flat: Tensor, init: DrawsParts) -> None:
    """Draw this rank's shard in the first replica, and broadcast it to the others: processors may round differently."""
    layout, comm, rank_groups = weights.layout, weights.comm, weights.rank_groups
    for piece in layout.owned(comm.rank) if rank_groups.writes else ():
        slot = layout.slots[piece.slot]
        with torch.no_grad():
            init.part(slot.name, flat[piece.offset :][: piece.numel], piece.interval[0], slot.numel)
    with labelled(f"{weights.name}/start"):
        own = flat[slice(*layout.interval(comm.rank))]
        rank_groups.replicate_group.broadcast(own, src=0).wait()
        if not weights.shard_params:
            layout.gather(comm, flat, own).wait()
