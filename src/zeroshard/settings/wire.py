"""The table ``[wire]`` of a run's settings: the formats in which weights and gradients are communicated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.settings.base import Config
from zeroshard.settings.wire_formats import check_block

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
        check_block("wire.block", self.block)
        in_blocks = {self.weights, self.grads} & set(BLOCK_FORMATS)
        if self.block != type(self).model_fields["block"].default and not in_blocks:
            what = f"{self.block} is given, and no wire format has blocks"
            raise UserError("wire.block", what, "add --wire.grads int8, or leave it out")
        if self.node_size == 1:
            raise UserError("wire.node_size", "1 GPU has nothing to add up", "give the GPUs of a node, or leave it out")
        if self.node_size and self.grads == "as-is":
            what = f"{self.node_size} is given, and gradients have no wire format"
            raise UserError("wire.node_size", what, "add --wire.grads int8, or leave it out")
        return self
