"""Conversion of GPT-2 and LLaMA to and from the form of Hugging Face's `transformers`: names, shapes and settings.

| | theirs | ours |
|---|---|---|
| names, GPT-2 | ``transformer.h.0.ln_1.weight``; published files without ``transformer.`` | ``blocks.0.ln_1.weight`` |
| names, LLaMA | ``model.layers.0.mlp.up_proj.weight`` | ``blocks.0.mlp.up_proj.weight`` |
| matrices, GPT-2 | ``Conv1D``: [in, out] | ``nn.Linear``: [out, in], so transposed |
| rotary pairs | (i, i + D/2) | the same: nothing is permuted |
| tied head | not in the file | one parameter, by its first name |
| biases, GPT-2 | always | may be absent: exported as zeros, which compute the same |
| epsilon | any | GPT-2: only 1e-5; LLaMA: any |

This module reads no files, copies no tensors and does not need `transformers`. A setting that our models cannot compute
raises a UserError, which names its key in ``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from zeroshard.host.errors import UserError
from zeroshard.models.config import ModelConfig
from zeroshard.models.gpt2 import LAYER_NORM_EPS, GPT2Config
from zeroshard.models.llama import LlamaConfig

# Buffers that older releases wrote among the weights: causal masks and rotary wavelengths. Our models compute both.
_NO_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
# Our activation: its names in `transformers`, the one that is written first.
_ACTIVATIONS = {"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu": ("gelu", "gelu_python")}
_CHANGE_MODEL = "take a model without it"
OurConfig = GPT2Config | LlamaConfig


@dataclass(frozen=True)
class _Names:
    """The prefixes of `transformers` outside and inside of blocks; our names that are embedding or transposed there."""

    base: str
    blocks: str
    embedding: str
    transposed: re.Pattern[str] | None = None


_NAMES: dict[type[OurConfig], _Names] = {
    GPT2Config: _Names("transformer.", "transformer.h.", "wte.weight", re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")),
    LlamaConfig: _Names("model.", "model.layers.", "embed_tokens.weight"),
}


@dataclass(frozen=True)
class HFWeight:
    """One tensor, with its names and shapes in both forms."""

    name: str | None  # our name; None if our model lacks the tensor, which is then zeros in `transformers`
    hf_name: str  # name in `transformers`
    shape: tuple[int, ...]  # our shape
    transposed: bool = False  # whether the tensor of `transformers` is the transpose of ours (2-D)

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The tensor's shape in `transformers`."""
        return self.shape[::-1] if self.transposed else self.shape


def published(config: ModelConfig) -> OurConfig:
    """Return ``config`` if it is of a model family that this module can convert.

    Raises:
        UserError: the model is of another family.
    """
    if not isinstance(config, OurConfig):
        what = f"a {type(config).__name__} has no form in Hugging Face's transformers"
        raise UserError("source", what, "take its tensors from zeroshard.consolidate")
    return config


def embedding_of(config: OurConfig) -> str:
    """Return our name of the token embedding, which a tied head shares."""
    return _NAMES[type(config)].embedding


def hf_weights(config: OurConfig) -> list[HFWeight]:
    """List every tensor of a model with this configuration, in our order; a tied head is not listed."""
    names = _NAMES[type(config)]
    with torch.device("meta"):
        own = {name for name, _ in config.build().named_parameters()}
        full = replace(config, bias=True).build() if isinstance(config, GPT2Config) else config.build()
    weights = []
    for name, param in full.named_parameters():
        if name == "lm_head.weight":
            hf_name = name
        elif name.startswith("blocks."):
            hf_name = names.blocks + name.removeprefix("blocks.")
        else:
            hf_name = names.base + name
        transposed = names.transposed is not None and names.transposed.search(name) is not None
        weights.append(HFWeight(name if name in own else None, hf_name, tuple(param.shape), transposed))
    return weights


def find_weights(config: OurConfig, hf_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, HFWeight]:
    """Match the tensors in files to our parameters.

    Args:
        config: configuration of the model, with biases.
        hf_shapes: shape of every tensor in the files, by name.

    Returns:
        By name in the files, one entry for each of our parameters. If the files contain a tied ``lm_head.weight`` too,
        it has an entry with our name for the embedding that it must equal.

    Raises:
        UserError: a tensor is missing, has another shape, or has no place in the model.
    """
    found: dict[str, HFWeight] = {}
    for weight in hf_weights(config):
        names = (weight.hf_name, re.sub(r"^(transformer|model)\.", "", weight.hf_name))
        name = next((name for name in names if name in hf_shapes), None)
        if name is None:
            raise UserError(weight.hf_name, "is not among the weights", "take the folder of a whole model")
        _check_shape(name, hf_shapes[name], weight.hf_shape)
        found[name] = weight
    rest = [name for name in hf_shapes if name not in found and not _NO_WEIGHTS.search(name)]
    if "lm_head.weight" in rest:
        embedding = next(weight for weight in found.values() if weight.name == embedding_of(config))
        _check_shape("lm_head.weight", hf_shapes["lm_head.weight"], embedding.shape)
        found["lm_head.weight"] = replace(embedding, hf_name="lm_head.weight")
        rest.remove("lm_head.weight")
    if rest:
        raise UserError(rest[0], "is among the weights, and the model has no place for it", _CHANGE_MODEL)
    return found


def hf_config(config: OurConfig, *, dtype: str, eos_id: int | None = None, bos_id: int | None = None) -> dict[str, Any]:
    """Return the content of ``config.json`` for a model of ours.

    Args:
        dtype: dtype of the file's tensors, such as ``"float32"``.
        eos_id: id of the token that ends a text; None: there is none.
        bos_id: id of the token that begins a text; None: ``eos_id``, as with GPT-2.
    """
    shared = {
        "vocab_size": config.vocab_size,
        "bos_token_id": eos_id if bos_id is None else bos_id,
        "eos_token_id": eos_id,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": 0.02,
        "dtype": dtype,
    }
    if isinstance(config, GPT2Config):
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": config.seq_len,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "n_inner": None,
            "activation_function": _ACTIVATIONS[config.activation][0],
            "layer_norm_epsilon": LAYER_NORM_EPS,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            **shared,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": config.seq_len,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.ffn_width,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # read by programs that know no `rope_parameters`
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        **shared,
    }


def from_hf_config(raw: Mapping[str, Any]) -> OurConfig:
    """Return our configuration of the model that ``config.json`` describes.

    Missing keys have the defaults of `transformers`. Keys that do not affect what the model computes are ignored.

    Raises:
        UserError: another kind of model, or a setting that our models cannot compute; the message names the key.
    """
    kind = raw.get("model_type")
    if kind == "gpt2":
        return _gpt2(raw)
    if kind == "llama":
        return _llama(raw)
    raise UserError("config.json: model_type", f"{kind!r} cannot be imported", "take a gpt2 or llama model")


def _gpt2(raw: Mapping[str, Any]) -> GPT2Config:
    n_embd = raw.get("n_embd", 768)
    known = {theirs: ours for ours, names in _ACTIVATIONS.items() for theirs in names}
    _only(raw, "activation_function", known, "gelu_new")
    _only(raw, "layer_norm_epsilon", (LAYER_NORM_EPS,), 1e-5)
    _only(raw, "scale_attn_weights", (True,), True)
    _only(raw, "scale_attn_by_inverse_layer_idx", (False,), False)
    _only(raw, "add_cross_attention", (False,), False)
    _only(raw, "tie_word_embeddings", (True,), True)
    _only(raw, "n_inner", (None, 4 * n_embd if isinstance(n_embd, int) else None), None)
    rates = {key: raw.get(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if len(set(map(repr, rates.values()))) > 1:
        what = ", ".join(f"{key} {value}" for key, value in rates.items())
        raise UserError("config.json: embd_pdrop", f"{what} are not one rate", "make the three equal")
    return GPT2Config(
        vocab_size=raw.get("vocab_size", 50257),
        seq_len=raw.get("n_positions", 1024),
        n_layer=raw.get("n_layer", 12),
        n_head=raw.get("n_head", 12),
        n_embd=n_embd,
        dropout=rates["embd_pdrop"],
        activation=known[raw.get("activation_function", "gelu_new")],
    )


def _llama(raw: Mapping[str, Any]) -> LlamaConfig:
    _only(raw, "hidden_act", ("silu",), "silu")
    _only(raw, "attention_bias", (False,), False)
    _only(raw, "mlp_bias", (False,), False)
    _only(raw, "attention_dropout", (0, 0.0), 0.0)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
    if rope_type != "default":
        key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        raise UserError(f"config.json: {key}", f"{rope_type!r} is not computed here", _CHANGE_MODEL)
    n_head = raw.get("num_attention_heads", 32)
    n_kv_head = raw.get("num_key_value_heads")
    config = LlamaConfig(
        vocab_size=raw.get("vocab_size", 32000),
        seq_len=raw.get("max_position_embeddings", 2048),
        n_layer=raw.get("num_hidden_layers", 32),
        n_head=n_head,
        n_kv_head=n_head if n_kv_head is None else n_kv_head,
        n_embd=raw.get("hidden_size", 4096),
        ffn_hidden=raw.get("intermediate_size", 11008),
        rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10_000.0)),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_embeddings=raw.get("tie_word_embeddings", False),
    )
    _only(raw, "head_dim", (None, config.head_dim), None)
    return config


def _only(raw: Mapping[str, Any], key: str, computed: Iterable[Any], default: Any) -> None:
    """Raise UserError unless ``raw[key]`` is one of the values that our model can compute."""
    computed = [value for value in computed if value is not None or default is None]
    value = raw.get(key, default)
    if value not in computed:
        known = " or ".join(repr(value) for value in dict.fromkeys(computed) if value is not None)
        raise UserError(f"config.json: {key}", f"{value!r} is not computed here, but {known} is", _CHANGE_MODEL)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        what = f"has shape {list(found)} where config.json says {list(expected)}"
        raise UserError(name, what, "take weights and config.json from one folder")
