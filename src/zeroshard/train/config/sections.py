"""The tables of a run's settings: ``[model]``, ``[data]``, ``[optim]``, ``[profile]``, ``[plan]``, ``[link]``,
``[track]``.

Each checks its own values; `zeroshard.train.config.config` holds them, and checks what must fit between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from zeroshard.data.registry import SOURCES
from zeroshard.errors import UserError
from zeroshard.models.hugging_face.folder import is_hugging_face
from zeroshard.models.presets import PRESETS
from zeroshard.train.config.registered import ModelName, SourceName
from zeroshard.train.config.sizes import parse_bandwidth, parse_count, parse_duration, parse_size

# `model = "NAME"` stands for `model.name = "NAME"`
SHORTHANDS = {"model": "name", "data": "source", "track": "to", "lora": "rank"}
TRACKERS = ("tensorboard", "wandb", "trackio")
HUGGING_FACE = ("attention", "from_config", "trust_remote_code", "config_json")  # settings of hf: models alone
UNNAMED = "unnamed"  # the data of an imported run: only its user knows which they are
Count = Annotated[int, BeforeValidator(parse_count)]  # 1_000_000, or 1M


class Config(BaseModel):
    """Settings: every key is known, and none changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Config):
    """Which model: a preset by name, and sizes that replace the preset's."""

    name: ModelName = Field(
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
    activation_checkpointing: str = Field(
        "none",
        description="Recompute in backward: none, full, every:N (N-th block), selective[:2] (all but products).",
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
        if not re.fullmatch(r"none|full|selective(:2)?|every:[1-9]\d*", self.activation_checkpointing):
            raise UserError(
                "model.activation_checkpointing",
                f"{self.activation_checkpointing!r} is not a choice",
                "choose none, full, selective, selective:2, or every:N for every N-th block",
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
    """Adapters that are trained in the place of the model's own weights, by the names of the package peft."""

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


class DataConfig(Config):
    """Which text, cut into tokens how, kept where."""

    source: SourceName = Field(
        "python-stdlib",
        min_length=1,
        description=f"{', '.join(SOURCES)}; OWNER/NAME[:CONFIGURATION][@SPLIT] of the Hugging Face hub; or module:name "
        "of your own. bin: tokens of nanoGPT or llm.c.",
    )
    path: tuple[str, ...] = Field(
        (), description="Files, folders, globs or addresses to read: text, .parquet, .jsonl[.gz|.zst], .bin."
    )
    column: str = Field("text", min_length=1, description="Of .parquet and .jsonl, that holds the text.")
    tokenizer: str = Field(
        "bytes",
        min_length=1,
        description="bytes, gpt2, another of tiktoken's, bpe:N (N trained tokens), json:PATH of a tokenizer.json or of "
        "nanoGPT's meta.pkl.",
    )
    val_path: tuple[str, ...] = Field(
        (), description="Further validation sets, each NAME=FILE, whose losses are logged as val_loss/NAME."
    )
    val_fraction: float = Field(0.1, gt=0, lt=1, description="Share of the text kept for validation.")
    max_tokens: Count = Field(0, ge=0, description="Tokens to keep at most, as 500000 or 1B; 0: all.")
    dir: str = Field("", description="Folder of the prepared tokens; empty: named after the rest, in data/.")
    streaming: bool = Field(
        False, description="Train straight from .parquet, .jsonl or the hub, and prepare nothing before."
    )
    document_mask: bool = Field(False, description="Attention stays inside a document; the tokenizer must end them.")
    packing: bool = Field(
        False,
        description="Rows of seq_len tokens hold several examples, or documents of text; attention stays inside each.",
    )
    format: Literal["text", "chat", "prompt"] = Field(
        "text",
        description="text; chat: conversations; prompt: pairs of prompt and completion. Of these two the loss is that "
        "of what the model answers.",
    )
    template: str = Field(
        "", description="chat: file of a template in Jinja2, or chatml; empty: that beside the tokenizer.json."
    )
    messages: str = Field("messages", min_length=1, description="chat: column of the lists of role and content.")
    prompt: str = Field("prompt", min_length=1, description="prompt: column of what is given.")
    completion: str = Field("completion", min_length=1, description="prompt: column of what is learned.")
    too_long: Literal["cut", "drop"] = Field(
        "cut", description="chat, prompt: what becomes of an example of more than seq_len tokens."
    )
    workers: int = Field(0, ge=0, description="Processes that encode text; 0: one per core, as far as there is work.")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, raw: Any) -> Any:
        return {SHORTHANDS["data"]: raw} if isinstance(raw, str) else raw

    @property
    def val_paths(self) -> dict[str, str]:
        """Further validation sets: files by name."""
        return {name: path for name, _, path in (each.partition("=") for each in self.val_path)}

    @model_validator(mode="after")
    def _validation_sets_have_names(self) -> Self:
        names = []
        for each in self.val_path:
            name, _, path = each.partition("=")
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or not path:
                raise UserError("data.val_path", f"{each!r} is no NAME=FILE", "write each as code=code.jsonl")
            if name in names:
                raise UserError("data.val_path", f"two sets have the name {name}", "give each its own")
            names.append(name)
        if names and self.streaming:
            todo = "leave it out, or prepare the data: without data.streaming"
            raise UserError("data.val_path", "is given, and a stream validates on what it holds out alone", todo)
        return self

    @model_validator(mode="after")
    def _can_be_packed(self) -> Self:
        if self.packing and self.streaming:
            todo = "leave it out, or prepare the data: without data.streaming"
            raise UserError("data.packing", "is given, and a stream is not packed", todo)
        if self.packing and self.document_mask:
            what = "is given, and data.packing keeps documents apart by itself"
            raise UserError("data.document_mask", what, "leave one of the two out")
        return self

    @model_validator(mode="after")
    def _fits_its_format(self) -> Self:
        fields = type(self).model_fields
        given = {name for name in fields if getattr(self, name) != fields[name].default}
        wrong = next(
            (name for name, formats in _OF_FORMATS.items() if name in given and self.format not in formats), ""
        )
        if wrong:
            formats = " or ".join(_OF_FORMATS[wrong])
            what = f"is given, and data.format is {self.format}"
            raise UserError(f"data.{wrong}", what, f"leave it out, or add --data.format {formats}")
        return self


# Settings of some formats alone.
_OF_FORMATS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("column", "max_tokens", "streaming", "document_mask"), ("text",)),
    **dict.fromkeys(("template", "messages"), ("chat",)),
    **dict.fromkeys(("prompt", "completion"), ("prompt",)),
    "too_long": ("chat", "prompt"),
}


class OptimConfig(Config):
    """How the learning rate goes, and which steps are taken."""

    decay: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="How the learning rate comes down to min_lr after warm-up. constant: not at all. wsd: by a line, "
        "in the last steps.",
    )
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps in which it comes down.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of each target that is spread over all ids, in training."
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the squared logarithm of softmax's denominator in the training loss, as 1e-4; 0: off.",
    )
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="AdamW: added to the denominator of an update.")
    max_not_finite: int = Field(
        10, ge=1, description="Steps in a row whose loss or gradient is not finite that end the run; each is skipped."
    )
    skip_spikes: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Skip a step whose loss is this many standard deviations above the last ones; 0: never.",
    )


class ProfileConfig(Config):
    """What a run measures of itself, beyond each step's record."""

    trace_steps: int = Field(
        0, ge=0, description="Steps to trace, into OUT/trace/trace.json, from the third on; 0: none."
    )
    memory: bool = Field(
        False, description="Find the peak of memory by category, from every operation of the second step."
    )
    overlap: bool = Field(False, description="Time each collective to its end: what was hidden, in summary.json.")


class ContractConfig(Config):
    """Whether a run is held to its plan of memory, collectives and time."""

    enforce: bool = Field(
        False, description="End with status 3 where resident bytes or counted collectives are not those planned."
    )
    device: str = Field("", description="File of `zeroshard bench device`, to predict the time of a step; empty: none.")


class LinkConfig(Config):
    """A slower network than there is, between nodes; quantities carry their unit."""

    mode: Literal["none", "simulated", "netns", "tc"] = Field(
        "none",
        description="simulated: by our communicator. netns: a network namespace for each node, as root. tc: an "
        "interface that `zeroshard lab tc apply` has shaped. none: the network as it is.",
    )
    bandwidth: str = Field("", description="Of a node's link in each direction, as 1Gbit/s; empty: as it is.")
    latency: str = Field("", description="Of a link, one way, as 50us; empty: as it is.")
    burst: str = Field(
        "",
        description="What passes at once after a pause, as 64KiB; empty: simulated none, else what the shaper needs.",
    )
    node_size: int = Field(1, ge=1, description="Neighbouring ranks that are a node, and share its link.")
    inside_bandwidth: str = Field("", description="Within a node, simulated only; empty: as it is.")
    inside_latency: str = Field("", description="Within a node, simulated only; empty: as it is.")
    device: str = Field("", description="Network interface of this host that tc has shaped, as eth1.")

    @model_validator(mode="after")
    def _says_what_is_slow(self) -> Self:
        bandwidths, durations = ("bandwidth", "inside_bandwidth"), ("latency", "inside_latency")
        given = [name for name in (*bandwidths, *durations, "burst", "device") if getattr(self, name)]
        if self.mode == "none" and (given or self.node_size > 1):
            what = "is given, and no link is slowed"
            raise UserError(f"link.{(given or ['node_size'])[0]}", what, "add --link.mode simulated, netns or tc")
        for names, parse in ((bandwidths, parse_bandwidth), (durations, parse_duration), (("burst",), parse_size)):
            for name in names:
                if getattr(self, name):
                    parse(f"link.{name}", getattr(self, name))
        if self.mode == "simulated" and not given:
            raise UserError("link.mode", "simulated does not say what", "add --link.bandwidth 1Gbit/s, or a latency")
        if self.mode in ("netns", "tc"):
            self._can_be_shaped()
        if (self.mode == "tc") != bool(self.device):
            raise UserError("link.device", f"{self.device!r} with mode {self.mode}", "give one with tc, and only then")
        return self

    def _can_be_shaped(self) -> None:
        if not self.bandwidth:
            raise UserError("link.bandwidth", f"{self.mode} shapes a bandwidth", "give one, as 1Gbit/s")
        for name in ("inside_bandwidth", "inside_latency"):
            if getattr(self, name):
                what = f"{self.mode} shapes what leaves a node, and nothing in it"
                raise UserError(f"link.{name}", what, "leave it out, or use --link.mode simulated")


class TrackConfig(Config):
    """Who is told of the run's numbers, beside its own log."""

    to: tuple[str, ...] = Field((), description="tensorboard, wandb, trackio; none: metrics.jsonl alone.")
    project: str = Field("zeroshard", min_length=1, description="Under which wandb and trackio file the run.")
    name: str = Field("", description="Of the run there; empty: the run folder's.")
    group: str = Field("", description="wandb: what this run is shown with; empty: nothing.")
    tags: tuple[str, ...] = Field((), description="wandb: words to find the run by.")
    mode: Literal["online", "offline"] = Field("online", description="wandb: send, or write into the run folder.")

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
        for field in ("group", "tags"):
            if getattr(self, field) and "wandb" not in self.to:
                raise UserError(f"track.{field}", "wandb alone has such", "add --track wandb, or leave it out")
        return self


def require_data(data: DataConfig) -> None:
    """Raise UserError where the data of an imported run were not named yet."""
    if data.source == UNNAMED:
        what = "the run was imported, and only you know what it is to be trained on"
        raise UserError("data", what, "add --data text --data.path FILES, or another source, see --help")
