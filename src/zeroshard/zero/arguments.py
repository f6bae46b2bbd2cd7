"""What `zeroshard.Zero` is asked for: checked, compared between ranks, and the groups of ranks that it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from zeroshard.comm import Communicator, LocalCommunicator
from zeroshard.comm.agree import agreement
from zeroshard.comm.module_buffers import BufferSync
from zeroshard.host.torch_internals import is_traceable_wrapper_subclass
from zeroshard.settings import rules
from zeroshard.zero.compat.module_methods import has_engine
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.precision import MixedPrecision

if TYPE_CHECKING:
    from zeroshard.zero.offload.placement import Offloading

_OTHER_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def device_of(model: object, device: torch.device | str | None) -> torch.device | None:
    """Return where ``model`` will train; None if it has no parameters, or is no module."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    found = next((param.device for param in params), None)
    if found is None or found.type != "meta":
        return found
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


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


def placed(
    offload: Any,
    strategy: ShardingStrategy,
    comm: Communicator,
    shard_size: int | None,
    local_steps: object,
    reproducible: int | None,
) -> Offloading | None:
    """Return what the settings ``offload`` attach to an engine; None: nothing leaves the device.

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


def check_change(
    strategy: ShardingStrategy, precision: MixedPrecision, rank_groups: RankGroups, *, local_steps: bool
) -> None:
    """Raise ValueError if an engine cannot change to the row: for its ranks, wire format, or another second copy."""
    check_wire(strategy, precision)
    if rank_groups.shard_group is not rank_groups.world and not local_steps:
        rules.check_something_is_sharded(_stage(strategy))
    size = strategy.secondary_shard_size
    if size is not None and (rank_groups.node_group is None or rank_groups.node_group.world_size != size):
        raise ValueError(f"secondary_shard_size: {size} is not what the engine was made with; give it to Zero()")


def check_wire(strategy: ShardingStrategy, precision: MixedPrecision) -> None:
    """Raise ValueError if the row of the stage table does not support the wire format."""
    if precision.has_wire:
        name = "gather" if precision.gather is not None else "reduce"
        rules.check_wire(name, getattr(precision, name), _stage(strategy))


def ranks_of(
    comm: Communicator,
    strategy: ShardingStrategy,
    shard_size: int | None,
    precision: MixedPrecision,
    *,
    local_steps: bool,
    reproducible: int | None,
    accumulate: str | None,
) -> tuple[RankGroups, RankGroups]:
    """Return the groups of all ranks, and the engine's: with local steps those of one replica, as if it were the world.

    Collective. Raises ValueError for a ``shard_size`` without effect, local steps of one replica, what ``reproducible``
    bars, and a wire format that the row of the stage table does not support.
    """
    check_wire(strategy, precision)
    if reproducible is not None:
        wire = "precision.gather" if precision.gather else "precision.reduce" if precision.reduce else ""
        others: dict[str, Any] = {"local_steps": local_steps, "shard_size": shard_size, "accumulate": accumulate}
        rules.check_same_bits(reproducible, wire=wire, **others)
    if local_steps:
        rules.check_local_steps("local_steps", "it", shard_size)
    elif shard_size is not None:
        rules.check_something_is_sharded(_stage(strategy))
    ranks = RankGroups.of(comm, shard_size, strategy.secondary_shard_size, precision.node_size, reproducible)
    replica = RankGroups(ranks.shard_group, ranks.shard_group, LocalCommunicator(), ranks.node_group)
    return ranks, replica if local_steps else ranks


def _stage(strategy: ShardingStrategy) -> int:
    """0 if the row shards nothing; else a number above it."""
    return int(strategy.optim is SHARD)
