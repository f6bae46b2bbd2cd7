"""The tables of a run's settings: ``[model]``, ``[lora]``, ``[optim]``, ``[profile]``, ``[plan]``, ``[link]``,
``[track]``.

``[data]`` is in `data_section`, ``[local_steps]`` in `local_steps_settings`, ``[wire]`` in `wire_settings` and
``[offload]`` in `offload_settings`. Each table checks its own values; `zeroshard.train.config.config` contains the
tables and checks that they fit together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.models.hugging_face.folder import is_hugging_face
from zeroshard.models.presets import PRESETS
from zeroshard.settings.sizes import parse_bandwidth, parse_count, parse_duration, parse_size

# `model = "NAME"` stands for `model.name = "NAME"`
SHORTHANDS = {"model": "name", "data": "source", "track": "to", "lora": "rank", "offload": "state"}
TRACKERS = ("tensorboard", "wandb", "trackio")
HUGGING_FACE = ("attention", "from_config", "trust_remote_code", "config_json")  # settings that only hf: models have
Count = Annotated[int, BeforeValidator(parse_count)]  # 1_000_000, or 1M


def _as_switch(raw: Any) -> Any:
    words = {**dict.fromkeys(("true", "yes", "1"), "on"), **dict.fromkeys(("false", "no", "0"), "off")}
    return words.get(str(raw).lower(), raw)


AutoSwitch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_switch)]  # true and false are on and off


def _as_text(raw: Any) -> Any:
    return str(raw) if isinstance(raw, int) and not isinstance(raw, bool) else raw


Tiles = Annotated[str, BeforeValidator(_as_text)]  # none, auto or a number
TILES = "Tiles of tokens in which a recomputed block's feed-forward layer runs: none, auto, or how many."


class Config(BaseModel):
    """Base class of all settings: unknown keys are refused, and an instance is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def resolved(self, **values: Any) -> Self:
        """Return a copy with ``values`` that nobody gave, because this machine or other settings decide them."""
        copy = self.model_copy(update=values)
        copy.model_fields_set.difference_update(values)
        return copy


class ModelConfig(Config):
    """Which model: a preset by name, and sizes that replace the preset's."""

    name: str = Field(
        "gpt2-demo",
        min_length=1,
        description=f"Preset: {', '.join(PRESETS)}; hf:FOLDER or hf:OWNER/NAME, a causal language model of Hugging "
        "Face's transformers; or module:Class, a configuration class of your own.",
    )
    n_layer: int = Field(0, ge=0, description="Transformer blocks; 0: the preset's.")
    n_head: int = Field(0, ge=0, description="Attention heads; 0: the preset's.")
    n_kv_head: int = Field(0, ge=0, description="Key and value heads; 0: the preset's.")
    n_embd: int = Field(0, ge=0, description="Width in features; 0: the preset's.")
    vocab_size: int = Field(0, ge=0, description="Token ids; 0: as many as the tokenizer has.")
    seq_len: int = Field(0, ge=0, description="Longest sequence in tokens; 0: the preset's.")
    ffn_hidden: int = Field(0, ge=0, description="Width of LLaMA's feed-forward layer; 0: the preset's.")
    rope_theta: float = Field(0.0, ge=0, allow_inf_nan=False, description="Base of rotary waves; 0: the preset's.")
    norm_eps: float = Field(0.0, ge=0, allow_inf_nan=False, description="Epsilon of LLaMA's norms; 0: the preset's.")
    tie_embeddings: Literal["preset", "yes", "no"] = Field(
        "preset", description="LLaMA: one matrix for embedding and output head."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability that an activation is dropped.")
    bias: bool = Field(True, description="Biases in GPT-2's linear layers and norms.")
    activation: Literal["preset", "gelu_tanh", "gelu"] = Field(
        "preset", description="GPT-2: the approximation by tanh, as OpenAI's, or the exact GELU, as nanoGPT's."
    )
    activation_checkpointing: str = Field(
        "none",
        description="Recompute in backward: none, full, offload (full, inputs on the host), every:N (N-th block), "
        "selective[:2] (all but products).",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="hf: who computes attention, as transformers calls it; auto: sdpa, else eager."
    )
    from_config: bool = Field(False, description="hf: train from scratch; weights are drawn and none read.")
    trust_remote_code: bool = Field(False, description="hf: execute Python files of the model's own.")
    config_json: str = Field(
        "", description="hf: the model's config.json as text, which a run keeps; empty: as folder or hub have it."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, raw: Any) -> Any:
        return {SHORTHANDS["model"]: raw} if isinstance(raw, str) else raw

    @model_validator(mode="after")
    def _hugging_face_alone(self) -> Self:
        fields = type(self).model_fields
        given = [name for name in HUGGING_FACE if getattr(self, name) != fields[name].default]
        if given and not is_hugging_face(self.name):
            what = f"is given, and {self.name} is no model of transformers"
            raise UserError(f"model.{given[0]}", what, "leave it out, or name a model as hf:FOLDER or hf:OWNER/NAME")
        return self

    @model_validator(mode="after")
    def _recomputation_is_known(self) -> Self:
        if not re.fullmatch(r"none|full|offload|selective(:2)?|every:[1-9]\d*", self.activation_checkpointing):
            raise UserError(
                "model.activation_checkpointing",
                f"{self.activation_checkpointing!r} is not a choice",
                "choose none, full, offload, selective, selective:2, or every:N for every N-th block",
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_embd and self.n_head and self.n_embd % self.n_head:
            raise UserError(
                "model.n_head",
                f"{self.n_head} heads do not divide a width of {self.n_embd}",
                "choose n_head so that n_embd is a multiple of it",
            )
        if self.n_head and self.n_kv_head and self.n_head % self.n_kv_head:
            raise UserError(
                "model.n_kv_head",
                f"{self.n_kv_head} key heads do not divide {self.n_head} heads",
                "choose n_kv_head so that n_head is a multiple of it",
            )
        return self


class LoraConfig(Config):
    """LoRA adapters, which are trained instead of the model's own weights; names are those of the package peft."""

    rank: int = Field(
        0,
        ge=0,
        le=2**20,
        description="LoRA: train adapters of this rank and nothing else; 0: train the model's weights.",
    )
    alpha: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Adapters are scaled by alpha / rank; 0: twice the rank."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability that an input of an adapter is dropped.")
    targets: tuple[str, ...] = Field(
        (),
        description="Linear layers that get adapters, by name or its end, as q_proj v_proj; all-linear: all in the "
        "blocks; none: those that peft takes for the architecture.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_rank(cls, raw: Any) -> Any:
        if isinstance(raw, str | int | float) and not isinstance(raw, bool):
            return {SHORTHANDS["lora"]: raw}
        if isinstance(raw, Mapping) and isinstance(raw.get("targets"), str):
            return {**raw, "targets": [raw["targets"]]}
        return raw

    @model_validator(mode="after")
    def _of_adapters_alone(self) -> Self:
        fields = type(self).model_fields
        given = [name for name in ("alpha", "dropout", "targets") if getattr(self, name) != fields[name].default]
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

    to: tuple[str, ...] = Field((), description="tensorboard, wandb, trackio; none: metrics.jsonl alone.")
    project: str = Field("zeroshard", min_length=1, description="Under which wandb and trackio file the run.")
    name: str = Field("", description="Name of the run there; empty: the run folder's.")
    group: str = Field(
        "", description="wandb, trackio: what this run is shown with; empty: nothing, in a sweep the sweep."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            return {"to": [raw]}
        if isinstance(raw, Mapping) and isinstance(raw.get("to"), str):
            return {**raw, "to": [raw["to"]]}
        return raw

    @model_validator(mode="after")
    def _trackers_are_known(self) -> Self:
        for name in self.to:
            if name not in TRACKERS:
                raise UserError("track.to", f"{name!r} is not a tracker", f"choose of {', '.join(TRACKERS)}")
        if self.group and not {"wandb", "trackio"} & set(self.to):
            raise UserError("track.group", "wandb and trackio alone have such", "add --track wandb, or leave it out")
        return self
