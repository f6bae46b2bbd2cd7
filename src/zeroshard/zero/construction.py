"""Construction of an engine: check its arguments, and move the model's parameters into units of flat buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.comm.agree import agreement
from zeroshard.comm.module_buffers import BufferSync
from zeroshard.host.torch_internals import is_traceable_wrapper_subclass
from zeroshard.zero.buffers.partition import partition_of
from zeroshard.zero.buffers.plain import Members
from zeroshard.zero.buffers.unit import FlatGroup, build_groups
from zeroshard.zero.compat.module_methods import has_engine
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.core.units import UnitSpec
from zeroshard.zero.kept_modules import kept_params
from zeroshard.zero.meta_models import Init, materialise
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.stepping.observer import Observer
from zeroshard.zero.transport.members import ALL
from zeroshard.zero.unit_choice import UnitChoice, describe_units

_log = logging.getLogger("zeroshard.zero")
_OTHER_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def same_on_every_rank(comm: Communicator) -> AbstractContextManager[list[str]]:
    """As `agreement`: raise on every rank what the block raises on one, or if they append different descriptions."""
    return agreement(comm, "Zero", "give every rank the same model and arguments")


def described(
    model: nn.Module,
    strategy: ShardingStrategy,
    precision: MixedPrecision,
    prefetch: int,
    shard_size: int | None,
    buffers: BufferSync,
    rest: Mapping[str, object],
) -> Iterator[str]:
    """Describe the arguments of `zeroshard.Zero` and the model's parameters: what ranks must have in common."""
    arguments = {"prefetch": prefetch, "shard_size": shard_size, "buffers": buffers, **rest}
    yield strategy.name
    yield str(precision)
    yield from (f"{name}={value!r}" for name, value in arguments.items())
    for name, param in model.named_parameters():
        yield f"{name} of {param.dtype} {list(param.shape)}, {'trained' if param.requires_grad else 'frozen'}"


def check_arguments(
    model: nn.Module,
    prefetch: int,
    accumulate: str | None,
    precision: MixedPrecision,
    buffers: BufferSync,
    local_steps: object,
) -> None:
    """Raise TypeError or ValueError for a model that an engine cannot train, or an unknown setting."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} is not an nn.Module")
    around = next((part for part in model.modules() if isinstance(part, _OTHER_WRAPPERS)), None)
    if around is not None:
        raise ValueError(
            f"model: a {type(around).__name__} averages gradients itself; give Zero() the module inside of it"
        )
    if any(is_traceable_wrapper_subclass(param) for param in model.parameters()):
        raise ValueError(
            "model: its parameters are sharded already (DTensor, as of fully_shard); give an ordinary module"
        )
    if has_engine(model):
        raise ValueError("model: it, or a part of it, has an engine already; call remove() on that one first")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, got {prefetch!r}")
    if not isinstance(precision, MixedPrecision):
        raise TypeError(f"precision: {precision!r} is not a MixedPrecision; give MixedPrecision(torch.bfloat16)")
    if local_steps is not None and not hasattr(local_steps, "attach"):
        raise TypeError(f"local_steps: {local_steps!r} is no LocalSteps; give LocalSteps(every=H)")
    if accumulate not in (None, "local", "sharded"):
        raise ValueError(f"accumulate: {accumulate!r} is unknown; choose 'local' or 'sharded'")
    if buffers not in get_args(BufferSync):
        choices = ", ".join(map(repr, get_args(BufferSync)))
        raise ValueError(f"buffers: {buffers!r} is unknown; choose one of {choices}")


class Away(Protocol):
    """Keeps the state of some units off the device: `zeroshard.zero.offload.placement` does."""

    def members(self, numels: Sequence[int], others: Members) -> Sequence[Members]:
        """For units in the order of the forward, by their numbers of elements: each one's members."""

    def attach(self, runtime: Runtime, observers: list[Observer]) -> None:
        """Take part in an engine's steps."""


class Coded(Protocol):
    """Keeps frozen weights as codes: `zeroshard.zero.FrozenFormat` does."""

    def members(
        self, specs: Sequence[UnitSpec], others: Sequence[Members], kept: frozenset[Tensor]
    ) -> Sequence[Members]:
        """For units, the root first: each one's members, instead of the others; ``kept``: what stays in fp32."""


def placed(
    offload: Any,
    strategy: ShardingStrategy,
    comm: Communicator,
    shard_size: int | None,
    local_steps: object,
    reproducible: int | None,
) -> Away | None:
    """Return the `zeroshard.zero.offload.placement.Offloading` of the settings ``offload``; None: nothing leaves.

    Raises:
        TypeError: ``offload`` is no `zeroshard.zero.Offload`.
        ValueError: it does not go with another setting.
    """
    if offload is None:
        return None
    if not hasattr(offload, "attach"):
        raise TypeError(f"offload: {offload!r} is no Offload; give zeroshard.zero.Offload(optimizer='host')")
    others = {"local_steps": local_steps is not None, "reproducible": reproducible is not None}
    return offload.attach(strategy, rank=comm.rank, alone=shard_size == 1 < comm.world_size, **others)


def parts_of(
    model: nn.Module,
    units: UnitChoice | None,
    strategy: ShardingStrategy,
    rank_groups: RankGroups,
    precision: MixedPrecision,
    init: Init | None,
    device: torch.device | str | None,
    away: Away | None = None,
    coded: Coded | None = None,
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


def device_of(model: object, device: torch.device | str | None) -> torch.device | None:
    """Return where ``model`` will train; None if it has no parameters, or is no module."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    found = next((param.device for param in params), None)
    if found is None or found.type != "meta":
        return found
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


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
