"""The table ``[model]`` of a run's settings."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.models.config import check_recomputation
from zeroshard.models.hugging_face.folder import is_hugging_face
from zeroshard.models.presets import PRESETS
from zeroshard.settings.base import SHORTHANDS, Config, Free
from zeroshard.settings.tables import LoraConfig

HUGGING_FACE = ("attention", "from_config", "trust_remote_code", "config_json")  # settings that only hf: models have


class ModelConfig(Config):
    """Which model: a preset by name, and sizes that replace the preset's."""

    shorthand = SHORTHANDS["model"]

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

    @model_validator(mode="after")
    def _hugging_face_alone(self) -> Self:
        given = self.changed(*HUGGING_FACE)
        if given and not is_hugging_face(self.name):
            what = f"is given, and {self.name} is no model of transformers"
            raise UserError(f"model.{given[0]}", what, "leave it out, or name a model as hf:FOLDER or hf:OWNER/NAME")
        return self

    @model_validator(mode="after")
    def _recomputation_is_known(self) -> Self:
        check_recomputation(self.activation_checkpointing)
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


class ModelTables(Config):
    """Tables that say what is trained."""

    model: Free[ModelConfig] = ModelConfig()
    lora: LoraConfig = LoraConfig()
