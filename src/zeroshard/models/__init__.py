"""Language models, each a complete definition in one file; they know nothing of sharding."""

from zeroshard.models.base import LanguageModel, flops_per_token, materialize, next_token_loss
from zeroshard.models.config import ModelConfig
from zeroshard.models.gpt2 import GPT2, GPT2Config
from zeroshard.models.llama import Llama, LlamaConfig
from zeroshard.models.presets import PRESETS, build_model, model_config, nearest_preset

__all__ = [
    "GPT2",
    "PRESETS",
    "GPT2Config",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "ModelConfig",
    "build_model",
    "flops_per_token",
    "materialize",
    "model_config",
    "nearest_preset",
    "next_token_loss",
]
