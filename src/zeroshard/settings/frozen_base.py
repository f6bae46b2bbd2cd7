"""The table ``[base]`` of a run's settings: in which format weights that are not trained are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.host.lazily import is_address, loaded
from zeroshard.settings.base import SHORTHANDS, Config, Names
from zeroshard.settings.wire_formats import check_block

if TYPE_CHECKING:
    from zeroshard.zero.frozen_formats.settings import FrozenFormat


class BaseConfig(Config):
    """Weights under adapters as codes of few bits, decoded for each use (QLoRA); they are not trained."""

    shorthand = SHORTHANDS["base"]

    format: Literal["none", "nf4", "int8", "int4", "e4m3"] = Field(
        "none",
        description="Format of the blocks' matrices that lora leaves as they are: nf4 (QLoRA's) and int4 have 0.563 "
        "bytes a weight, int8 and e4m3 1.016. none: the compute type's 2 or 4.",
    )
    double: bool = Field(False, description="Scales are kept in 8 bits themselves: 0.516 bytes a weight with nf4.")
    block: int = Field(
        0, ge=0, description="Weights that share a scale, a multiple of 16 up to 4096; 0: 64 with 4 bits, 256 with 8."
    )
    only: Names = Field(
        (), description="Names of the weights that it is for, as *.mlp.*; none: all matrices of blocks, no embedding."
    )

    @property
    def on(self) -> bool:
        """Whether frozen weights are kept as codes."""
        return self.format != "none"

    @property
    def as_frozen_format(self) -> FrozenFormat | None:
        """The argument ``frozen_format`` of `zeroshard.Zero`."""
        if not self.on:
            return None
        kind = loaded("zeroshard.zero.frozen_formats.settings", "FrozenFormat")
        return kind(self.format, self.block or None, self.double, self.only or None)

    @model_validator(mode="after")
    def _of_codes_alone(self) -> Self:
        given = self.changed()
        if given and not self.on:
            raise UserError(f"base.{given[0]}", "is given, and base is none", "add --base nf4, or leave it out")
        if self.block:
            check_block("base.block", self.block)
        if "" in self.only:
            raise UserError("base.only", "one of them is empty", "name weights, as *.mlp.*")
        return self


def check_base(config: Any, ours: str = "") -> None:
    """Raise UserError if ``config``, of a run or a plan, freezes nothing or cannot keep what is frozen as codes.

    ``ours``: the strategies that could, if the one of the run cannot; empty: it can.
    """
    name = config.base.format
    if not config.base.on:
        return
    if not config.lora.rank and not is_address(config.model.name):  # a class of the user's may freeze by itself
        what = f"{name} is for weights that are not trained, and without adapters all are"
        raise UserError("base.format", what, "add --lora 16, or leave it out")
    if ours:
        what = f"{name} is given, and {config.strategy} does not use zeroshard's engine"
        raise UserError("base.format", what, f"leave it out, or use --strategy {ours}")
    if config.node_copy:
        what = f"{config.node_copy} with base = {name}, and codes have no second copy"
        raise UserError("node_copy", what, "leave one of the two out")
