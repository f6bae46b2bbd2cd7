"""Strategies by name: their factories, and the properties that the trainer must know before it builds one.

To add a strategy, write one file in this folder and add one row to `STRATEGIES`. Error messages, ``--help`` and
the validation of settings read the rows, which needs no torch. ``--strategy module:name`` names a user's
own strategy: it has no row, and all properties at their defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroshard.host.errors import UserError
from zeroshard.host.lazily import is_address, made_at

if TYPE_CHECKING:
    from zeroshard.parallel.base import Setup, Strategy


@dataclass(frozen=True, slots=True)
class StrategyEntry:
    """A row of `STRATEGIES`; calling it builds the strategy.

    Attributes:
        factory: a class or function that takes a `Setup` and returns a `Strategy`, or its ``module:name``.
        stage: the ZeRO stage that needs as much memory, for predictions.
        planned: whether it is a stage of our engine. Then its memory and traffic are predicted to the byte, and the
            engine's own settings apply.
        over_torch: whether it communicates through torch.distributed's default group, also if it is given a
            communicator over something else.
        needs_group: whether it needs that group even in a world of one rank. (DDP does not: it uses the plain module.)
        from_meta: whether it allocates the parameters of a model on the meta device; if not, it must be given a model
            on a real device.
        frees_weights: whether it can free unsharded weights between forward and backward (``reshard_after_forward``).
        our_optimizers: whether `MuonAdamW` works with it. It needs plain tensors, the param groups as given, and
            matrices that are unsharded or owned by our engine.
        evaluates: whether `zeroshard eval` accepts it.
    """

    factory: str | Callable[[Setup], Strategy]
    stage: int = 0
    planned: bool = False
    over_torch: bool = False
    needs_group: bool = False
    from_meta: bool = False
    frees_weights: bool = False
    our_optimizers: bool = False
    evaluates: bool = True

    @property
    def module(self) -> str:
        """The module of the factory; empty if the factory is an object already, and needs no import."""
        return self.factory.partition(":")[0] if isinstance(self.factory, str) else ""

    def __call__(self, setup: Setup) -> Strategy:
        """Build the strategy."""
        return made_at(self.factory, "strategy", ("model", "optimizer", "named_shards"), setup)


def _stage(stage: int) -> StrategyEntry:
    factory = f"zeroshard.parallel.zero:zero{stage}"
    return StrategyEntry(factory, stage, planned=True, from_meta=True, frees_weights=stage == 3, our_optimizers=True)


STRATEGIES: dict[str, StrategyEntry] = {
    "zero0": _stage(0),
    "zero1": _stage(1),
    "zero2": _stage(2),
    "zero3": _stage(3),
    "ddp": StrategyEntry("zeroshard.parallel.ddp:Ddp", over_torch=True, our_optimizers=True),
    "zero1-torch": StrategyEntry(
        "zeroshard.parallel.zero_redundancy:ZeroRedundancy", 1, over_torch=True, needs_group=True, evaluates=False
    ),
    "fsdp2": StrategyEntry(
        "zeroshard.parallel.fsdp2:Fsdp2", 3, over_torch=True, needs_group=True, from_meta=True, frees_weights=True
    ),
}


def strategy_entry(name: str) -> StrategyEntry:
    """Return the row of ``name``; for ``module:name`` a row with all defaults.

    Imports nothing.

    Raises:
        UserError: no strategy has this name.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if is_address(name):
        return StrategyEntry(name)
    raise _unknown(name)


def strategies_with(prop: str) -> tuple[str, ...]:
    """Return the names of the strategies whose rows have the property ``prop``."""
    return tuple(name for name, entry in STRATEGIES.items() if getattr(entry, prop))


def build_strategy(name: str, setup: Setup) -> Strategy:
    """Build the strategy ``name``, which may be a ``module:name``.

    Raises:
        UserError: no strategy has this name.
    """
    return strategy_entry(name)(setup)


def _unknown(name: str) -> UserError:
    todo = f"choose one of {', '.join(STRATEGIES)}, or write module:name"
    return UserError("strategy", f"there is no {name!r}", todo)
