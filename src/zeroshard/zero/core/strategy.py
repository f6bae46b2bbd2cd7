"""The stage table: a ZeRO stage is a row, and each column decides exactly one thing.

| column   | question                                                                        |
|----------|---------------------------------------------------------------------------------|
| `params` | does a rank keep unsharded weights, or free them after each use?                |
| `grads`  | do the gradients of micro-batches accumulate unsharded, or as a shard?          |
| `optim`  | does the optimizer see all or a shard, and so: all-reduce, or reduce-scatter?   |

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
https://arxiv.org/abs/1910.02054, section 5. There are no stage classes: one engine reads the row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from zeroshard.settings import rules


class Placement(Enum):
    """Where a kind of training state lives."""

    REPLICATE = "replicate"  # unsharded on every rank
    SHARD = "shard"  # one ``1 / world_size`` slice of each flat buffer on each rank


REPLICATE, SHARD = Placement.REPLICATE, Placement.SHARD


@dataclass(frozen=True)
class ShardingStrategy:
    """One row of the stage table. Sharded `params` need sharded `grads`, and sharded `grads` need sharded `optim`.

    Attributes:
        params, grads, optim: `Placement` or its value (``"replicate"``, ``"shard"``).
        reshard_after_forward: with sharded `params`, free unsharded weights after forward and gather them again for
            backward, except the last unit's, which backward needs first. False: keep them until backward has used them.
        secondary_shard_size: with sharded `params`, gather them again from a second copy over this many neighbours.

    Raises:
        ValueError: an unknown placement; sharded `params` or `grads` without what they need; a
            ``secondary_shard_size`` that has no effect.
    """

    params: Placement
    grads: Placement
    optim: Placement
    reshard_after_forward: bool = True
    secondary_shard_size: int | None = None

    @property
    def name(self) -> str:
        """``stage 3``; of a row that is not in `STAGES`, its columns."""
        number = next((number for number, row in STAGES.items() if row == self), None)
        return str(self) if number is None else f"stage {number}"

    def __post_init__(self) -> None:
        for column in ("params", "grads", "optim"):
            value = getattr(self, column)
            try:
                object.__setattr__(self, column, Placement(value))
            except ValueError:
                raise ValueError(f"{column}: {value!r} is no placement; choose 'replicate' or 'shard'") from None
        if self.params is SHARD and self.grads is REPLICATE:
            raise ValueError("params: sharded weights need sharded gradients; shard `grads` and `optim` too")
        if self.grads is SHARD and self.optim is REPLICATE:
            raise ValueError("grads: sharded gradients need a sharded optimizer; shard `optim` too")
        if not isinstance(self.reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward: {self.reshard_after_forward!r} is not a bool; give True or False")
        if self.secondary_shard_size is not None:
            field, size, who = "secondary_shard_size", self.secondary_shard_size, "a row of replicated weights"
            rules.check_count(field, size)
            rules.check_second_copy(field, size, who, shards=self.params is SHARD, reshards=self.reshard_after_forward)


STAGES: dict[int, ShardingStrategy] = {
    0: ShardingStrategy(params=REPLICATE, grads=REPLICATE, optim=REPLICATE),
    1: ShardingStrategy(params=REPLICATE, grads=REPLICATE, optim=SHARD),
    2: ShardingStrategy(params=REPLICATE, grads=SHARD, optim=SHARD),
    3: ShardingStrategy(params=SHARD, grads=SHARD, optim=SHARD),
}


def resolve_strategy(stage: int | ShardingStrategy, secondary_shard_size: int | None = None) -> ShardingStrategy:
    """Return the row of `STAGES` with that number, with that second copy, or the given `ShardingStrategy` as it is.

    Raises ValueError for another number, and for a second copy beside a `ShardingStrategy`.
    """
    if isinstance(stage, ShardingStrategy):
        if secondary_shard_size is not None:
            raise ValueError("secondary_shard_size: stage is a ShardingStrategy, which has this field; set it there")
        return stage
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(f"stage: {stage!r} is not a ZeRO stage; choose 0, 1, 2 or 3, or give a ShardingStrategy")
    row = STAGES[stage]
    return row if secondary_shard_size is None else replace(row, secondary_shard_size=secondary_shard_size)
