"""Data-parallel strategies by name: ours (``zero0`` to ``zero3``) and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable

from zeroshard.errors import UserError
from zeroshard.parallel.base import Setup, Strategy
from zeroshard.parallel.ddp import Ddp
from zeroshard.parallel.zero import ZeroStrategy, at_stage


def _zero_redundancy(setup: Setup) -> Strategy:
    from zeroshard.parallel.zero_redundancy import ZeroRedundancy  # half a second of torch that few need

    return ZeroRedundancy(setup)


def _fsdp2(setup: Setup) -> Strategy:
    from zeroshard.parallel.fsdp2 import Fsdp2  # as above

    return Fsdp2(setup)


STRATEGIES: dict[str, Callable[[Setup], Strategy]] = {
    "zero0": at_stage(0),
    "zero1": at_stage(1),
    "zero2": at_stage(2),
    "zero3": at_stage(3),
    "ddp": Ddp,
    "zero1-torch": _zero_redundancy,
    "fsdp2": _fsdp2,
}
# They communicate through torch.distributed's default group, whatever communicator they are given for messages.
OVER_TORCH = frozenset({"ddp", "zero1-torch", "fsdp2"})
# Even in a world of one, where DDP is the plain module.
NEEDS_GROUP = frozenset({"zero1-torch", "fsdp2"})
# They make the parameters of a model on the meta device; the others need it whole.
FROM_META = frozenset({"zero0", "zero1", "zero2", "zero3", "fsdp2"})
# They have whole weights to free between forward and backward, or not to.
SHARDS_WEIGHTS = frozenset({"zero3", "fsdp2"})


def build_strategy(name: str, setup: Setup) -> Strategy:
    """Build the strategy called ``name``.

    Raises:
        UserError: there is none of this name.
    """
    if name not in STRATEGIES:
        raise UserError("strategy", f"there is no {name!r}", f"choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](setup)


__all__ = [
    "FROM_META",
    "NEEDS_GROUP",
    "OVER_TORCH",
    "SHARDS_WEIGHTS",
    "STRATEGIES",
    "Ddp",
    "Setup",
    "Strategy",
    "ZeroStrategy",
    "build_strategy",
]
