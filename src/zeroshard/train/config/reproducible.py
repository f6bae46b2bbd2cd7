"""The setting ``reproducible``: the same bits on any number of ranks."""

from __future__ import annotations

from zeroshard.errors import UserError
from zeroshard.parallel.registry import strategies_with, strategy_entry
from zeroshard.train.config.replica_settings import ReplicasConfig
from zeroshard.train.config.wire_settings import WireConfig

FIELD = "reproducible"


def check_reproducible(
    leaves: int, strategy: str, wire: WireConfig, replicas: ReplicasConfig, *, shard_size: int, accumulate: str
) -> None:
    """Raise UserError for a number of leaves that is no power of two, and beside what rounds sums in between."""
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
    """Raise UserError where they are no power of two: means by other numbers are rounded."""
    if leaves & (leaves - 1):
        raise UserError(FIELD, f"{leaves} is no power of two", f"give {1 << leaves.bit_length()}, or 0 for off")


def check_ranks(leaves: int, world_size: int) -> None:
    """Raise UserError where ``leaves`` cannot be shared out evenly to so many ranks."""
    if leaves and leaves % world_size:
        sizes = ", ".join(str(1 << power) for power in range(leaves.bit_length()))
        what = f"{leaves} micro-batches cannot be shared out evenly to {world_size} ranks"
        raise UserError(FIELD, what, f"use {sizes} ranks, or another power of two here")


def rows_per_step(leaves: int, micro_batch_size: int, grad_accum_steps: int, global_batch_size: int) -> int:
    """Sequences in a step over all ranks, however many ranks there are.

    Raises:
        UserError: ``global_batch_size`` cannot be shared out to ``leaves``.
    """
    at_once = micro_batch_size * leaves
    if global_batch_size % at_once:
        what = f"{global_batch_size} is no multiple of {micro_batch_size} (micro_batch_size) x {leaves} ({FIELD})"
        raise UserError("global_batch_size", what, "change one of the three")
    return global_batch_size or at_once * grad_accum_steps
