"""Language models, each a complete definition in one file; they know nothing of sharding.

Names are imported on first use, so that the command line can read configurations without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.models.base import InitialValues as InitialValues
    from zeroshard.models.base import LanguageModel as LanguageModel
    from zeroshard.models.base import flops_per_token as flops_per_token
    from zeroshard.models.base import materialize as materialize
    from zeroshard.models.base import next_token_loss as next_token_loss
    from zeroshard.models.config import ModelConfig as ModelConfig
    from zeroshard.models.gpt2 import GPT2 as GPT2
    from zeroshard.models.gpt2 import GPT2Config as GPT2Config
    from zeroshard.models.head import Head as Head
    from zeroshard.models.head import head_loss as head_loss
    from zeroshard.models.head import with_embedding_and_head as with_embedding_and_head
    from zeroshard.models.hugging_face.shared_sequences import share_sequences as share_sequences
    from zeroshard.models.llama import Llama as Llama
    from zeroshard.models.llama import LlamaConfig as LlamaConfig
    from zeroshard.models.presets import PRESETS as PRESETS
    from zeroshard.models.presets import Preset as Preset
    from zeroshard.models.presets import build_model as build_model
    from zeroshard.models.presets import model_config as model_config
    from zeroshard.models.presets import nearest_preset as nearest_preset
    from zeroshard.models.recompute import offload_inputs as offload_inputs
    from zeroshard.models.ulysses import SequenceParallel as SequenceParallel

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
