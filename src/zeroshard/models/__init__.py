"""Language models, each a complete definition in one file; they know nothing of sharding.

Names are imported on first use, so that the command line can read configurations without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.lazily import loaded

if TYPE_CHECKING:
    from zeroshard.models.base import InitialValues, LanguageModel, flops_per_token, materialize, next_token_loss
    from zeroshard.models.config import ModelConfig
    from zeroshard.models.gpt2 import GPT2, GPT2Config
    from zeroshard.models.head import Head, head_loss, with_embedding_and_head
    from zeroshard.models.llama import Llama, LlamaConfig
    from zeroshard.models.presets import PRESETS, Preset, build_model, model_config, nearest_preset

_HOME = {
    "GPT2": "gpt2",
    "GPT2Config": "gpt2",
    "Head": "head",
    "InitialValues": "base",
    "LanguageModel": "base",
    "Llama": "llama",
    "LlamaConfig": "llama",
    "ModelConfig": "config",
    "PRESETS": "presets",
    "Preset": "presets",
    "build_model": "presets",
    "flops_per_token": "base",
    "head_loss": "head",
    "materialize": "base",
    "model_config": "presets",
    "nearest_preset": "presets",
    "next_token_loss": "base",
    "with_embedding_and_head": "head",
}

__all__ = [
    "GPT2",
    "PRESETS",
    "GPT2Config",
    "Head",
    "InitialValues",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "ModelConfig",
    "Preset",
    "build_model",
    "flops_per_token",
    "head_loss",
    "materialize",
    "model_config",
    "nearest_preset",
    "next_token_loss",
    "with_embedding_and_head",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(f"{__name__}.{_HOME[name]}", name)
