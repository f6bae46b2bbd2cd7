"""Checks of the setting ``reproducible``: bit-identical training on 1, 2, 4, ... ranks, up to the number given.

A step is cut into ``reproducible`` micro-batches over all ranks, times ``grad_accum_steps``. ``leaves`` here is that
number; `zeroshard.zero.buffers.leaves` explains it.
"""

from __future__ import annotations

from zeroshard.errors import UserError
from zeroshard.parallel.registry import strategies_with, strategy_entry
from zeroshard.train.config.replica_settings import ReplicasConfig
from zeroshard.train.config.wire_settings import WireConfig

FIELD = "reproducible"


def check_reproducible(
    leaves: int, strategy: str, wire: WireConfig, replicas: ReplicasConfig, *, shard_size: int, accumulate: str
) -> None:
    """Raise UserError if ``leaves`` is not a power of two, or if another setting would round partial sums.

    A partial sum that is rounded makes the result depend on the number of ranks.
    """
    if not leaves:
        return
    check_power(leaves)
    if not strategy_entry(strategy).planned:
        what = f"{leaves} is given, and {strategy} adds gradients up in an order that depends on the number of ranks"
        raise UserError(FIELD, what, f"leave it out, or use --strategy {', '.join(strategies_with('planned'))}")
    rounds = {
        f"wire.{wire.given}": (bool(wire.given), "rounds what each rank sends"),
        "replicas.every": (replicas.on, "has replicas take steps of their own"),
        "shard_size": (bool(shard_size), "adds up over two levels of ranks, with a rounding between them"),
        "accumulate": (accumulate == "local", "adds up on each rank first, with a rounding after it"),
    }
    for name, (given, what) in rounds.items():
        if given:
            raise UserError(FIELD, f"{leaves} is given, and {name} {what}", "leave one of the two out")


def check_power(leaves: int) -> None:
    """Raise UserError unless ``leaves`` is a power of two: dividing by any other number rounds."""
    if leaves & (leaves - 1):
        raise UserError(FIELD, f"{leaves} is no power of two", f"give {1 << leaves.bit_length()}, or 0 for off")


def check_ranks(leaves: int, world_size: int) -> None:
    """Raise UserError if ``world_size`` ranks cannot share ``leaves`` micro-batches evenly."""
    if leaves and leaves % world_size:
        sizes = ", ".join(str(1 << power) for power in range(leaves.bit_length()))
        what = f"{leaves} micro-batches cannot be shared out evenly to {world_size} ranks"
        raise UserError(FIELD, what, f"use {sizes} ranks, or another power of two here")


def rows_per_step(leaves: int, micro_batch_size: int, grad_accum_steps: int, global_batch_size: int) -> int:
    """Return the number of sequences in a step over all ranks, which does not depend on the number of ranks.

    Raises:
        UserError: ``global_batch_size`` is not a multiple of ``micro_batch_size * leaves``.
    """
    at_once = micro_batch_size * leaves
    if global_batch_size % at_once:
        what = f"{global_batch_size} is no multiple of {micro_batch_size} (micro_batch_size) x {leaves} ({FIELD})"
        raise UserError("global_batch_size", what, "change one of the three")
    return global_batch_size or at_once * grad_accum_steps
