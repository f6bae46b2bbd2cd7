"""Data-parallel strategies by name: ours (``zero0`` to ``zero3``) and PyTorch's own (``ddp``)."""

from __future__ import annotations

from collections.abc import Callable

from zeroshard.errors import UserError
from zeroshard.parallel.base import Setup, Strategy
from zeroshard.parallel.ddp import Ddp
from zeroshard.parallel.zero import ZeroStrategy, at_stage

STRATEGIES: dict[str, Callable[[Setup], Strategy]] = {
    "zero0": at_stage(0),
    "zero1": at_stage(1),
    "zero2": at_stage(2),
    "zero3": at_stage(3),
    "ddp": Ddp,
}


def build_strategy(name: str, setup: Setup) -> Strategy:
    """Build the strategy called ``name``.

    Raises:
        UserError: there is none of this name.
    """
    if name not in STRATEGIES:
        raise UserError("strategy", f"there is no {name!r}", f"choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](setup)


__all__ = ["STRATEGIES", "Ddp", "Setup", "Strategy", "ZeroStrategy", "build_strategy"]
