"""Tiny models of `transformers`, each with its own kind of layers, saved as folders."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB_SIZE, SEQ_LEN = 97, 12
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "tie_word_embeddings": True, "rope_scaling": _LLAMA3, "rope_theta": 10_000.0},
    "qwen2": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": {**_GROUPED, "head_dim": 8, "tie_word_embeddings": False},
    "mistral": {**_GROUPED, "sliding_window": 5},
    "gemma2": {**_GROUPED, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 5},
    "gemma3_text": {**_GROUPED, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 5},
    "phi": {**_SIZES, "partial_rotary_factor": 0.5},
    "phi3": {**_GROUPED},
    "gpt_neox": {**_SIZES, "rotary_pct": 0.5, "tie_word_embeddings": False},
    "smollm3": {**_GROUPED, "no_rope_layer_interval": 2},
    "qwen3_moe": {
        **_GROUPED,
        "head_dim": 4,
        "moe_intermediate_size": 12,
        "num_experts": 32,  # more than a micro-batch of few tokens chooses
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
    "mixtral": {**_GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
}


def require_transformers() -> Any:
    """The package, with its bars off."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def make_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random model, larger than `transformers` draws it, so that every part of it counts."""
    transformers = require_transformers()
    config = transformers.AutoConfig.for_model(kind, **{**ARCHITECTURES[kind], **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    return model.eval()


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """`hf_folder(kind)`: the folder of a tiny model, made once."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder_of(kind: str) -> Path:
        make_model(kind).save_pretrained(root / kind)
        return root / kind

    return folder_of
