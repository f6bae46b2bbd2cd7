"""Tiny models of `transformers`, each with its own kind of layers, saved as folders."""

import math
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
GROUPED = {**_SIZES, "num_key_value_heads": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": True, "rope_scaling": _LLAMA3, "rope_theta": 10_000.0},
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 8, "tie_word_embeddings": False},
    "mistral": {**GROUPED, "sliding_window": 5},
    "gemma2": {**GROUPED, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 5},
    "gemma3_text": {**GROUPED, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 5},
    "phi": {**_SIZES, "partial_rotary_factor": 0.5},
    "phi3": {**GROUPED},
    "gpt_neox": {**_SIZES, "rotary_pct": 0.5, "tie_word_embeddings": False},
    "smollm3": {**GROUPED, "no_rope_layer_interval": 2},
    "qwen3_moe": {
        **GROUPED,
        "head_dim": 4,
        "moe_intermediate_size": 12,
        "num_experts": 32,  # more than a micro-batch of few tokens chooses
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
    "mixtral": {**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
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
    config = transformers.AutoConfig.for_model(kind, **{**ARCHITECTURES.get(kind, GROUPED), **changes})
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


@pytest.fixture
def text_model(tmp_path):
    """A folder of a model with a tokenizer and a chat template, and a text beside it."""
    from zeroshard.data.tokenizer import train_bpe

    folder, text = tmp_path / "model", "the quick brown fox jumps over the lazy dog\n"
    make_model("llama", vocab_size=300).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(train_bpe(270, [text * 20]).to_json())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "text.txt").write_text(text * 200)
    return folder


def batches(num_steps: int):
    """Tokens and targets [4, SEQ_LEN] of each step; some positions have no target, as many in each row."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        tokens, targets = (torch.randint(3, VOCAB_SIZE, (4, SEQ_LEN), generator=generator) for _ in range(2))
        targets[:, 2:4] = -100
        yield tokens, targets


def trained(comm: Any, config: Any, num_steps: int, max_norm: float = math.inf):
    """Mean loss over ranks and norm of each step, the model and its strategy; ranks share out the rows."""
    from zeroshard.train.setup.assemble import sharded

    model, strategy = sharded(config, VOCAB_SIZE, None, comm, torch.device("cpu"))
    strategy.model.train()
    found = []
    for tokens, targets in batches(num_steps):
        rows = slice(comm.rank * 4 // comm.world_size, (comm.rank + 1) * 4 // comm.world_size)
        loss = strategy.model(tokens[rows], targets[rows])
        loss.backward()
        norm = float(strategy.clip_grad_norm_(max_norm))
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
        mean = loss.detach().clone()
        comm.all_reduce(mean).wait()
        found.append((float(mean) / comm.world_size, norm))
    return found, model, strategy


def trained_alone(model: Any, optimizer: torch.optim.Optimizer, num_steps: int, max_norm: float = math.inf):
    """Loss and norm of each step of one process with `transformers`' own model and loss, and torch's optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = []
    for tokens, targets in batches(num_steps):
        loss = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(params, max_norm))
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), norm))
    return found
