"""The table ``[wire]`` of a run's settings: the formats in which weights and gradients are communicated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from zeroshard.errors import UserError
from zeroshard.parallel.registry import STRATEGIES, strategies_with, strategy_entry
from zeroshard.train.config.sections import Config

Travels = Literal["as-is", "float32", "bfloat16", "float16", "int8", "int4", "e4m3", "fp8"]
BLOCK_FORMATS = ("int8", "int4", "e4m3", "fp8")


class WireConfig(Config):
    """Wire formats: the dtype or quantised format in which ranks send weights and gradients to each other."""

    weights: Travels = Field(
        "as-is",
        description="Wire format of weights: a type, or int8, int4, e4m3 (or fp8, the same) with a scale for each "
        "block; the master weights stay exact. as-is: the compute type.",
    )
    grads: Travels = Field(
        "as-is",
        description="Wire format of gradients, rounded stochastically in int8, int4, e4m3, and summed in float32; with "
        "shard_size between replicas. as-is: reduce_dtype.",
    )
    block: int = Field(
        256, description="Elements that share a scale in int8, int4, e4m3: a multiple of 16 from 16 to 4096."
    )

    node_size: int = Field(
        0,
        ge=0,
        description="GPUs of a node, where there are several nodes: gradients are added up inside each in "
        "reduce_dtype, and the sums alone travel in wire.grads. 0: every GPU sends its own to all others.",
    )

    @property
    def given(self) -> str:
        """The name of the first setting that selects a wire format, ``weights`` or ``grads``; "" if none does."""
        return next((name for name in ("weights", "grads") if getattr(self, name) != "as-is"), "")

    def as_precision(self, dtypes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for `zeroshard.zero.MixedPrecision`; ``dtypes`` maps names used here to torch dtypes."""

        def travels(name: str) -> Any:
            return None if name == "as-is" else dtypes.get(name, name)

        given = {"gather": travels(self.weights), "reduce": travels(self.grads), "block": self.block}
        return given | ({"node_size": self.node_size} if self.node_size else {})

    @model_validator(mode="after")
    def _blocks_travel(self) -> Self:
        if self.block % 16 or not 16 <= self.block <= 4096:
            what = f"blocks of {self.block} elements do not pack"
            raise UserError("wire.block", what, "give a multiple of 16 from 16 to 4096")
        in_blocks = {self.weights, self.grads} & set(BLOCK_FORMATS)
        if self.block != type(self).model_fields["block"].default and not in_blocks:
            what = f"{self.block} is given, and no wire format has blocks"
            raise UserError("wire.block", what, "add --wire.grads int8, or leave it out")
        self._nodes_exchange()
        return self

    def _nodes_exchange(self) -> None:
        """Raise UserError if ``node_size`` is 1, or is given without a wire format for gradients."""
        if self.node_size == 1:
            raise UserError("wire.node_size", "1 GPU has nothing to add up", "give the GPUs of a node, or leave it out")
        if self.node_size and self.grads == "as-is":
            what = f"{self.node_size} is given, and gradients have no wire format"
            raise UserError("wire.node_size", what, "add --wire.grads int8, or leave it out")


def check_wire(wire: WireConfig, strategy: str) -> None:
    """Raise UserError if the strategy has no such wire format."""
    if not wire.given:
        return
    entry = strategy_entry(strategy)
    ours = ", ".join(name for name in strategies_with("planned") if STRATEGIES[name].stage)
    todo = f"leave it out, or use --strategy {ours}"
    name, value = f"wire.{wire.given}", getattr(wire, wire.given)
    if not entry.planned:
        raise UserError(name, f"{value} is given, and {strategy} does not use zeroshard's engine", todo)
    if strategy == "auto":
        raise UserError(name, f"{value} is given, and auto may choose stage 0, which has no wire formats", todo)
    if not entry.stage:
        what = f"{value} is given, and stage 0 has no wire format: no rank owns a shard to send or sum"
        raise UserError(name, what, todo)


def check_node_size(node_copy: int, num_shards: int) -> None:
    """Raise UserError unless ``node_copy`` ranks, at least 2, are a proper divisor of the ``num_shards`` that shard."""
    sizes = [size for size in range(2, num_shards) if num_shards % size == 0]
    if node_copy and node_copy not in sizes:
        what = f"{node_copy} does not divide the {num_shards} ranks that shard weights into several groups"
        todo = f"choose one of {', '.join(map(str, sizes))}" if sizes else "leave it out"
        raise UserError("node_copy", what, todo)


def check_wire_nodes(node_size: int, shard_size: int) -> None:
    """Raise UserError if both ``node_size`` and ``shard_size`` are set: each adds up gradients inside its groups."""
    if node_size and shard_size:
        what = f"{node_size} is given, and with shard_size = {shard_size} gradients are added up inside these ranks"
        raise UserError("wire.node_size", what, "leave one of the two out")


def check_wire_node_size(node_size: int, world_size: int) -> None:
    """Raise UserError unless ``world_size`` ranks divide into two or more nodes of ``node_size`` ranks."""
    sizes = [size for size in range(2, world_size) if world_size % size == 0]
    if node_size and node_size not in sizes:
        todo = f"choose one of {', '.join(map(str, sizes))}" if sizes else "leave it out"
        raise UserError("wire.node_size", f"{world_size} ranks do not divide into several nodes of {node_size}", todo)


def check_node_copy(node_copy: int, strategy: str, *, reshards: bool) -> None:
    """Raise UserError if ``node_copy`` would have no effect: without zero3, or without resharding after forward."""
    if node_copy and strategy != "zero3":
        what = f"{node_copy} is given, and {strategy} has no sharded weights of ours to gather again"
        raise UserError("node_copy", what, "leave it out, or use --strategy zero3")
    if node_copy and not reshards:
        what = f"{node_copy} is given, and weights that stay unsharded for backward are not gathered again"
        raise UserError("node_copy", what, "leave it out, or --no-reshard-after-forward")
