"""Construction of an engine: the units that the model's parameters move into, and their flat buffers; and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zeroshard.zero.arguments import same_on_every_rank
from zeroshard.zero.buffers.plain import Members
from zeroshard.zero.buffers.unit import FlatGroup, build_groups
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.core.units import UnitSpec
from zeroshard.zero.kept_modules import kept_params
from zeroshard.zero.meta_models import Init, materialise
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.transport.members import ALL
from zeroshard.zero.unit_choice import UnitChoice, describe_units, partition_of

if TYPE_CHECKING:
    from zeroshard.zero.frozen_formats.settings import FrozenFormat
    from zeroshard.zero.offload.placement import Offloading

_log = logging.getLogger("zeroshard.zero")


def parts_of(
    model: nn.Module,
    units: UnitChoice | None,
    strategy: ShardingStrategy,
    rank_groups: RankGroups,
    precision: MixedPrecision,
    init: Init | None,
    device: torch.device | str | None,
    away: Offloading | None = None,
    coded: FrozenFormat | None = None,
) -> tuple[list[UnitSpec], Callable[[UnitSpec], list[FlatGroup]]]:
    """Return what becomes a unit, the root first, and what makes the groups of each with initial values. Collective.

    Arguments and errors are those of `zeroshard.Zero`; ``away`` makes the units whose state is off the device,
    ``coded`` those of which frozen weights are kept as codes.
    """
    _check_lookups(model, rank_groups)
    on_meta = any(param.is_meta for param in model.parameters())
    if on_meta and init is None:
        raise ValueError("init: the model has parameters on the meta device; give a function that fills them")
    any_meta = on_meta or any(buffer.is_meta for buffer in model.buffers())
    meta = materialise(model, _default_device(device), init) if any_meta else set()
    fill = dict.fromkeys(meta, init) if init is not None else {}
    with same_on_every_rank(rank_groups.world) as told_units:
        root_spec, specs = partition_of(model, units)
        told_units += [f"unit {spec.name}" for spec in specs]
    if rank_groups.world.rank == 0:
        _log.info("Zero: %s", describe_units(model, [spec.module for spec in specs]))

    all_specs = [root_spec, *specs]
    kept = kept_params(model, precision)
    numels = [sum(param.numel() for _, param in spec.params) for spec in all_specs]
    members: Sequence[Members] = [ALL] * len(all_specs) if away is None else away.members(numels, ALL)
    members = members if coded is None else coded.members(all_specs, members, kept)

    own = dict(zip((spec.name for spec in all_specs), members, strict=True))

    def groups(spec: UnitSpec) -> list[FlatGroup]:
        return build_groups(spec.name, spec.params, strategy, rank_groups, precision, fill, own[spec.name], kept)

    return all_specs, groups


def _check_lookups(model: nn.Module, rank_groups: RankGroups) -> None:
    """Raise ValueError for an embedding whose forward rescales rows in place, because ranks look up different rows."""
    for name, part in model.named_modules():
        if rank_groups.world.world_size > 1 and isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm:
            raise ValueError(
                f"{name or 'model'}: with max_norm={part.max_norm} forward rescales the rows that it looks up, which "
                "differ between ranks; leave max_norm out, and clip rows inside zero.full_params(write_back=True)"
            )


def _default_device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def ordinary_weights(groups: Iterable[FlatGroup]) -> dict[nn.Parameter, Tensor]:
    """Return unsharded, current weights for a model without an engine, in the original dtypes. Collective."""
    weights: dict[nn.Parameter, Tensor] = {}
    for group in groups:
        views = group.params.layout.views(group.params.gather_master())
        weights.update({param: view.clone() for param, view in zip(group.params.params, views, strict=True)})
    return weights
