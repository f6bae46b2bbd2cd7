import math

import pytest
import torch

from zeroshard.host.errors import UserError
from zeroshard.models import GPT2, GPT2Config

SMALL = GPT2Config(vocab_size=61, seq_len=12, n_layer=2, n_head=4, n_embd=32)


def reference_logits(state: dict[str, torch.Tensor], tokens: torch.Tensor, config: GPT2Config) -> torch.Tensor:
    """GPT-2 spelled out: one head at a time, the mask and the softmax by hand."""
    num_tokens, width = tokens.shape[1], config.n_embd
    head_dim = width // config.n_head

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    x = state["wte.weight"][tokens] + state["wpe.weight"][:num_tokens]
    hidden = torch.ones(num_tokens, num_tokens).triu(1).bool()
    for i in range(config.n_layer):
        q, k, v = linear(norm(x, f"blocks.{i}.ln_1"), f"blocks.{i}.attn.c_attn").split(width, dim=-1)
        heads = []
        for h in range(config.n_head):
            part = slice(h * head_dim, (h + 1) * head_dim)
            scores = q[..., part] @ k[..., part].transpose(-1, -2) / math.sqrt(head_dim)
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[..., part])
        x = x + linear(torch.cat(heads, dim=-1), f"blocks.{i}.attn.c_proj")
        wide = linear(norm(x, f"blocks.{i}.ln_2"), f"blocks.{i}.mlp.c_fc")
        gelu = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        x = x + linear(gelu, f"blocks.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ state["wte.weight"].T


def test_logits_equal_the_formulas_spelled_out():
    model = GPT2(SMALL).double()
    with torch.no_grad():
        for param in model.parameters():  # values at which no term is negligible
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.3)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), reference_logits(model.state_dict(), tokens, SMALL), rtol=1e-9, atol=1e-9)


def test_names_are_gpt2_s():
    block = [
        f"{layer}.{kind}"
        for layer in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        for kind in ("weight", "bias")
    ]
    blocks = [f"blocks.{i}.{name}" for i in range(2) for name in block]
    named = ["wte.weight", "wpe.weight", *blocks, "ln_f.weight", "ln_f.bias"]
    model = GPT2(SMALL)
    assert [name for name, _ in model.named_parameters()] == named
    assert list(model.state_dict()) == [*named, "lm_head.weight"]


def test_initial_values_have_the_paper_s_spread():
    model = GPT2(GPT2Config(vocab_size=500, seq_len=64, n_layer=8, n_head=4, n_embd=128))
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            assert not param.any(), name
        elif ".ln_" in f".{name}":
            assert (param == 1).all(), name
        else:
            wanted = 0.02 / math.sqrt(2 * 8) if "c_proj" in name else 0.02
            assert param.std().item() == pytest.approx(wanted, rel=0.03), name
            assert param.mean().item() == pytest.approx(0, abs=wanted / 20), name


def test_a_sequence_longer_than_the_position_table_is_refused():
    with pytest.raises(UserError, match=r"^seq_len: 13 is above the model's 12; "):
        GPT2(SMALL)(torch.zeros(1, 13, dtype=torch.int64))


def test_dropout_acts_in_training_alone():
    model = GPT2(GPT2Config(vocab_size=61, seq_len=12, n_layer=2, n_head=4, n_embd=32, dropout=0.5))
    tokens = torch.arange(10).view(1, 10)
    torch.manual_seed(0)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), GPT2(SMALL)(tokens))


def test_checkpointing_repeats_the_same_dropout():
    tokens = torch.arange(10).view(1, 10)
    gradients = []
    for recompute in ("none", "full"):
        config = GPT2Config(61, 12, 2, 4, 32, dropout=0.3, activation_checkpointing=recompute)
        model = GPT2(config)
        torch.manual_seed(0)
        model(tokens, tokens).backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
