"""Strategies by name: where each is built, and what the trainer must know of it before it builds it.

A new strategy is one file in this folder and one row of `STRATEGIES`. Messages, ``--help``, shell completion and the
checks of settings read the rows, which needs no torch. ``--strategy module:name`` is a strategy of a user's own, which
has no row, and all properties at their defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroshard.errors import UserError
from zeroshard.lazily import is_address, made_at

if TYPE_CHECKING:
    from zeroshard.parallel.base import Setup, Strategy


@dataclass(frozen=True, slots=True)
class StrategyEntry:
    """A row; calling it builds the strategy.

    Attributes:
        factory: ``module:name`` of a class or function that takes a `Setup` and returns a `Strategy`, or itself.
        stage: the ZeRO stage that takes as much memory, for predictions.
        planned: a stage of our engine: its steps are planned to the byte, and its shards can be sized.
        over_torch: it communicates through torch.distributed's default group, whatever communicator it is given for
            messages.
        needs_group: it needs that group even in a world of one, where DDP is the plain module.
        from_meta: it makes the parameters of a model on the meta device; else it is given the whole model.
        frees_weights: it has unsharded weights to free between forward and backward, or to keep.
        our_optimizers: its optimizer is given plain tensors, matrices whole or at stages of ours, in the groups that
            it was asked for: what `FusedAdamW` and `MuonAdamW` need.
        evaluates: `zeroshard eval` may spread weights with it.
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
        """The module of the factory; empty where that needs no import."""
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


# What holds for ``--strategy auto`` before one of our stages is chosen.
_AUTO = StrategyEntry("", planned=True, from_meta=True)


def strategy_entry(name: str) -> StrategyEntry:
    """The row of ``name``, or one with all defaults for ``module:name``; for ``auto`` what is true of all our stages.

    Imports nothing.

    Raises:
        UserError: there is none of this name.
    """
    if name == "auto":
        return _AUTO
    if name in STRATEGIES:
        return STRATEGIES[name]
    if is_address(name):
        return StrategyEntry(name)
    raise _unknown(name)


def strategies_with(prop: str) -> tuple[str, ...]:
    """The names whose rows have this property."""
    return tuple(name for name, entry in STRATEGIES.items() if getattr(entry, prop))


def build_strategy(name: str, setup: Setup) -> Strategy:
    """Build the strategy called ``name``, or that ``module:name`` names.

    Raises:
        UserError: there is none of this name.
    """
    if name == "auto":
        raise _unknown(name)  # whoever trains chooses a stage first
    return strategy_entry(name)(setup)


def _unknown(name: str) -> UserError:
    todo = f"choose one of {', '.join(STRATEGIES)}, or write module:name"
    return UserError("strategy", f"there is no {name!r}", todo)
