"""Tables of a run's settings: ``[lora]``, ``[optim]``, ``[profile]``, ``[plan]``, ``[link]``, ``[track]``."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.settings.base import SHORTHANDS, Config, Fixed, Free, Names
from zeroshard.settings.sizes import parse_bandwidth, parse_duration, parse_size

TRACKERS = ("tensorboard", "wandb", "trackio")


class LoraConfig(Config):
    """LoRA adapters, which are trained instead of the model's own weights; names are those of the package peft."""

    rank: Fixed[int] = Field(
        0,
        ge=0,
        le=2**20,
        description="LoRA: train adapters of this rank and nothing else; 0: train the model's weights.",
    )
    alpha: Fixed[float] = Field(
        0.0, ge=0, allow_inf_nan=False, description="Adapters are scaled by alpha / rank; 0: twice the rank."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability that an input of an adapter is dropped.")
    targets: Fixed[Names] = Field(
        (),
        description="Linear layers that get adapters, by name or its end, as q_proj v_proj; all-linear: all in the "
        "blocks; none: those that peft takes for the architecture.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_rank(cls, raw: Any) -> Any:
        is_number = isinstance(raw, str | int | float) and not isinstance(raw, bool)
        return {SHORTHANDS["lora"]: raw} if is_number else raw

    @model_validator(mode="after")
    def _of_adapters_alone(self) -> Self:
        given = self.changed("alpha", "dropout", "targets")
        if given and not self.rank:
            raise UserError(f"lora.{given[0]}", "is given, and lora.rank is 0", "add --lora.rank 16, or leave it out")
        if "" in self.targets:
            raise UserError("lora.targets", "one of them is empty", "name linear layers, as q_proj v_proj")
        return self


class OptimConfig(Config):
    """The learning rate's decay, terms of the loss, AdamW's epsilon, and which steps are skipped."""

    decay: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="How the learning rate comes down to min_lr after warm-up. constant: not at all. wsd: by a line, "
        "in the last steps.",
    )
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps in which it comes down.")
    warmup: Literal["linear", "deepspeed-log", "deepspeed-linear"] = Field(
        "linear",
        description="How the learning rate climbs to lr. deepspeed-...: as DeepSpeed's schedulers, with their decay: "
        "WarmupLR is constant, WarmupDecayLR linear, WarmupCosineLR cosine.",
    )
    warmup_lr: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="deepspeed-...: the learning rate at which the warm-up begins."
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of each target that is spread over all ids, in training; it takes no memory.",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the squared logarithm of softmax's denominator in the training loss, as 1e-4; it "
        "takes no memory. 0: off.",
    )
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="AdamW: added to the denominator of an update.")
    max_not_finite: int = Field(
        10, ge=1, description="End the run after this many steps in a row with NaN/Inf; each is skipped."
    )

    @model_validator(mode="after")
    def _warmup_goes_with_the_decay(self) -> Self:
        if self.warmup == "linear" and self.warmup_lr:
            what = "a linear warm-up begins at lr / warmup_steps"
            raise UserError("optim.warmup_lr", what, "leave it out, or set optim.warmup")
        if self.warmup != "linear" and self.decay == "wsd":
            raise UserError("optim.warmup", "DeepSpeed has no scheduler with wsd", "set optim.decay, or leave it out")
        return self


class ProfileConfig(Config):
    """What to profile during training, beyond the record of each step."""

    trace_steps: int = Field(
        0, ge=0, description="Steps to trace, into a file of each rank in OUT/trace, from the third on; 0: none."
    )
    memory: bool = Field(
        False, description="Find the peak of memory by category, from every operation of the second step."
    )


class ContractConfig(Config):
    """Whether a run must match its plan: predicted memory and collectives (time is only reported)."""

    enforce: bool = Field(
        False, description="End with status 3 where resident bytes or counted collectives are not those planned."
    )
    device: str = Field("", description="File of `zeroshard bench device`, to predict the time of a step; empty: none.")


class LinkConfig(Config):
    """Slows the links between nodes, to test a slow network on a fast one; quantities carry their unit."""

    mode: Literal["none", "simulated", "netns"] = Field(
        "none",
        description="simulated: by our communicator. netns: a network namespace for each node, as root. none: the "
        "network as it is.",
    )
    bandwidth: str = Field("", description="Bandwidth of a node's link in each direction, as 1Gbit/s; empty: as it is.")
    latency: str = Field("", description="Latency of a link, one way, as 50us; empty: as it is.")
    burst: str = Field(
        "",
        description="What passes at once after a pause, as 64KiB; empty: simulated none, else what the shaper needs.",
    )
    node_size: int = Field(1, ge=1, description="Neighbouring ranks that are a node, and share its link.")

    @model_validator(mode="after")
    def _says_what_is_slow(self) -> Self:
        given = [name for name in ("bandwidth", "latency", "burst") if getattr(self, name)]
        if self.mode == "none" and (given or self.node_size > 1):
            what = "is given, and no link is slowed"
            raise UserError(f"link.{(given or ['node_size'])[0]}", what, "add --link.mode simulated or netns")
        for name, parse in (("bandwidth", parse_bandwidth), ("latency", parse_duration), ("burst", parse_size)):
            if getattr(self, name):
                parse(f"link.{name}", getattr(self, name))
        if self.mode == "simulated" and not given:
            raise UserError(
                "link.mode", "simulated has no bandwidth or latency", "add --link.bandwidth 1Gbit/s, or a latency"
            )
        if self.mode == "netns" and not self.bandwidth:
            raise UserError("link.bandwidth", "netns shapes a bandwidth", "give one, as 1Gbit/s")
        return self


class TrackConfig(Config):
    """The experiment trackers that get the run's metrics, in addition to ``metrics.jsonl``."""

    shorthand = SHORTHANDS["track"]

    to: Free[Names] = Field((), description="tensorboard, wandb, trackio; none: metrics.jsonl alone.")
    project: Free[str] = Field("zeroshard", min_length=1, description="Under which wandb and trackio file the run.")
    name: Free[str] = Field("", description="Name of the run there; empty: the run folder's.")
    group: Free[str] = Field(
        "", description="wandb, trackio: what this run is shown with; empty: nothing, in a sweep the sweep."
    )

    @model_validator(mode="after")
    def _trackers_are_known(self) -> Self:
        for name in self.to:
            if name not in TRACKERS:
                raise UserError("track.to", f"{name!r} is not a tracker", f"choose of {', '.join(TRACKERS)}")
        if self.group and not {"wandb", "trackio"} & set(self.to):
            raise UserError("track.group", "wandb and trackio alone have such", "add --track wandb, or leave it out")
        return self
