"""Models small enough to build in a millisecond, of every family, under one name each."""

import pytest
import torch

from zeroshard.models import GPT2, GPT2Config, LanguageModel, Llama, LlamaConfig

CONFIGS = {
    "gpt2": GPT2Config(vocab_size=61, seq_len=12, n_layer=2, n_head=4, n_embd=32),
    "gpt2-nobias": GPT2Config(vocab_size=61, seq_len=12, n_layer=2, n_head=2, n_embd=32, bias=False),
    "llama": LlamaConfig(vocab_size=61, seq_len=12, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_hidden=48),
    "llama-tied": LlamaConfig(
        vocab_size=61, seq_len=12, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, tie_embeddings=True
    ),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> GPT2Config | LlamaConfig:
    return CONFIGS[request.param]


@pytest.fixture
def build():
    """Builds the model of a configuration: build(config, seed=0)."""

    def build_from(config: GPT2Config | LlamaConfig, seed: int = 0) -> LanguageModel:
        return GPT2(config, seed) if isinstance(config, GPT2Config) else Llama(config, seed)

    return build_from


@pytest.fixture
def batch():
    """Token ids and targets [3, 10], drawn once."""
    drawn = torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1], drawn[:, 1:]
