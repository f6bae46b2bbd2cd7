"""What an engine is asked for, beside its model, its stage and its ranks: each setting once.

`EngineConfig` has the settings as words say them: 0, "none" and "auto" leave a choice to the engine. Flags of
`zeroshard train` and `zeroshard plan`, keys of files, axes of sweeps and the pages of the reference are made from its
fields. `EngineSettings` has those that are arguments of `zeroshard.Zero` as it takes them, where None leaves a choice.
Strategies and plans hold them, and hand them on together. docs/how-to/extend.md says how to add one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from zeroshard.settings import rules
from zeroshard.settings.base import TILES, Config, Fixed, Free, Tiles
from zeroshard.settings.frozen_base import BaseConfig
from zeroshard.settings.local_steps import LocalStepsConfig
from zeroshard.settings.offload import OffloadConfig
from zeroshard.settings.wire import WireConfig

if TYPE_CHECKING:
    from zeroshard.zero.frozen_formats.settings import FrozenFormat
    from zeroshard.zero.local_steps.settings import LocalSteps
    from zeroshard.zero.offload.settings import Offload

_LEFT_TO_THE_ENGINE = (0, "auto", "none", "master")


class EngineConfig(Config):
    """Settings of the engine and of how a model computes in it."""

    local_steps: LocalStepsConfig = LocalStepsConfig()
    wire: WireConfig = WireConfig()
    offload: OffloadConfig = OffloadConfig()
    base: Fixed[BaseConfig] = BaseConfig()

    shard_size: Free[int] = Field(
        0,
        ge=0,
        description="Consecutive ranks (a node's) that shard training state; other groups replicate it. 0: all; a plan "
        "tries both.",
    )
    node_copy: Free[int] = Field(
        0,
        ge=0,
        description="zero3: consecutive ranks (a node's) that shard a second copy of the weights, from which backward "
        "gathers; 0: none.",
    )
    sequence_parallel: Free[int] = Field(
        1,
        ge=1,
        description="Consecutive ranks that share each sequence: a rank has a part of its tokens, and in attention a "
        "part of its heads (Ulysses). A step has as many sequences as with that many fewer ranks.",
    )
    tiles: Free[Tiles] = Field("none", description=TILES)
    reshard_after_forward: Free[bool] = Field(
        True,
        description="Free the unsharded weights between forward and backward; zero3 and fsdp2 alone may keep them.",
    )
    prefetch: Free[int] = Field(
        1, ge=0, description="Units whose weights are gathered ahead of their use, where a stage frees them."
    )
    accumulate: Free[Literal["auto", "local", "sharded"]] = Field(
        "auto",
        description="How gradients of micro-batches accumulate: local (unsharded on each rank, one reduction), sharded "
        "(each micro-batch is reduced at once), auto (the stage's default).",
    )
    reduce_dtype: Literal["master", "float32", "bfloat16", "float16"] = Field(
        "master", description="Type in which gradients accumulate and are reduced; master: that of the master weights."
    )
    reproducible: int = Field(
        0,
        ge=0,
        description="The run has the same bits on 1, 2, 4, ... up to this many ranks, a power of two. A step has this "
        "many micro-batches over all ranks, times grad_accum_steps. 0: off.",
    )
    state_format: Literal["fp32", "bf16", "int8"] = Field(
        "fp32",
        description="How adamw keeps its states between steps: 8, 4 or 2.03 bytes a parameter, decoded for each step. "
        "bf16, int8: rounded at random, for zeroshard's stages.",
    )
    matmul: Literal["dtype", "fp8"] = Field(
        "dtype",
        description="Numbers that the blocks' linear layers multiply. fp8: 8 bits, with a scale for each row; "
        "by torchao, on GPUs from sm_89 on, with bfloat16, best with compile.",
    )
    kernels: Free[Literal["auto", "reference", "triton"]] = Field(
        "auto", description="Kernels of norms, rope, activations, loss and update. auto: Triton on a GPU, else PyTorch."
    )

    @property
    def frozen_format(self) -> FrozenFormat | None:
        """``base`` as `EngineChoices` has it."""
        return self.base.as_frozen_format

    @property
    def as_asked(self) -> dict[str, Any]:
        """The plain settings that `EngineSettings` has too, as it has them: None where a choice is left."""
        known = {each.name: each.default for each in fields(EngineSettings) if each.name not in _SECTIONS}
        return {name: _or_none(getattr(self, name)) if known[name] is None else getattr(self, name) for name in known}

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        """Check the settings with each other, for trainer and planner alike."""
        rules.check_node_sums("wire.node_size", self.wire.node_size, self.shard_size)
        if self.local_steps.on:
            rules.check_replicas_share(self.sequence_parallel, self.shard_size)
        if self.reproducible:
            rules.check_reproducible(self.reproducible)
            wire = f"wire.{self.wire.given}" if self.wire.given else ""
            beside: dict[str, Any] = {"tiles": self.tiles != "none", "sequence_parallel": self.shares_sequences}
            beside |= {"shard_size": self.shard_size, "local_steps": self.local_steps.on, "accumulate": self.accumulate}
            rules.check_same_bits(self.reproducible, wire=wire, **beside)
        return self

    def check_world(self, world_size: int) -> None:
        """Raise UserError if ``world_size`` ranks do not divide into the groups that the settings ask for."""
        rules.check_sequence_parallel(self.sequence_parallel, world_size)
        if self.shard_size:
            rules.check_shard_size(self.shard_size, world_size)
        if self.reproducible:
            rules.check_reproducible(self.reproducible, world_size)
        if self.node_copy:
            rules.check_groups("node_copy", self.node_copy, self.ranks_that_shard(world_size))
        if self.wire.node_size:
            rules.check_groups("wire.node_size", self.wire.node_size, world_size)

    @property
    def shares_sequences(self) -> bool:
        """Whether several ranks share each sequence."""
        return self.sequence_parallel > 1

    @property
    def has_exact_sums(self) -> bool:
        """Whether sums of gradients are exact, so that steps have the same bits on any number of ranks."""
        return self.reproducible > 0

    @property
    def keeps_state_away(self) -> bool:
        """Whether training state leaves the device."""
        return self.offload.on

    @property
    def keeps_state_on_disk(self) -> bool:
        """Whether training state goes to a file of each rank."""
        return self.offload.on_disk

    def left_uncompiled_with(self, recomputation: str) -> str:
        """The setting with which a GPU's run is not compiled unless it says so, as `rules.left_uncompiled_with`."""
        return rules.left_uncompiled_with(self.reproducible, self.tiles, self.sequence_parallel, recomputation)

    def ranks_that_shard(self, world_size: int) -> int:
        """Return the number of ranks over which training state is sharded."""
        return self.shard_size or world_size

    def num_groups(self, world_size: int) -> int:
        """Return the number of groups of ranks that share sequences, each of which takes sequences of its own."""
        return world_size // self.sequence_parallel


_SECTIONS = ("local_steps", "offload")  # whose tables become objects of the engine


def _or_none(value: Any) -> Any:
    return None if value in _LEFT_TO_THE_ENGINE else value


@dataclass(frozen=True, kw_only=True)
class EngineChoices:
    """Arguments of `zeroshard.Zero`, which says what they mean, and of `zeroshard.lab.planner.plan`."""

    prefetch: int = 1
    accumulate: Literal["local", "sharded"] | None = None
    reproducible: int | None = None
    offload: Offload | None = None
    frozen_format: str | FrozenFormat | None = None

    @property
    def choices(self) -> dict[str, Any]:
        """These settings by name, as keyword arguments."""
        return {each.name: getattr(self, each.name) for each in fields(EngineChoices)}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineChoices):
    """All of these arguments of `zeroshard.Zero`: also those of which a plan tries several."""

    shard_size: int | None = None
    local_steps: LocalSteps | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """All settings by name, as keyword arguments."""
        return {each.name: getattr(self, each.name) for each in fields(EngineSettings)}
