import math

import pytest
import torch

from zeroshard.models import Llama, LlamaConfig

SMALL = LlamaConfig(vocab_size=61, seq_len=12, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_hidden=48)
CPU = torch.device("cpu")


def reference_logits(state: dict[str, torch.Tensor], tokens: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """LLaMA spelled out: one head at a time, rotations as products of complex numbers."""
    num_tokens, head_dim = tokens.shape[1], config.head_dim
    half = head_dim // 2

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ state[f"{name}.weight"].T

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * state[f"{name}.weight"]

    def head(x: torch.Tensor, h: int) -> torch.Tensor:
        return x[..., h * head_dim : (h + 1) * head_dim]

    wavelengths = config.rope_theta ** (-torch.arange(half).double() * 2 / head_dim)
    turns = torch.polar(torch.ones(num_tokens, half).double(), torch.outer(torch.arange(num_tokens), wavelengths))

    def turn(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = state["embed_tokens.weight"][tokens]
    hidden = torch.ones(num_tokens, num_tokens).triu(1).bool()
    for i in range(config.n_layer):
        entrance = norm(x, f"blocks.{i}.input_layernorm")
        q, k, v = (linear(entrance, f"blocks.{i}.self_attn.{c}_proj") for c in "qkv")
        heads = []
        for h in range(config.n_head):
            shared = h // (config.n_head // config.n_kv_head)
            scores = turn(head(q, h)) @ turn(head(k, shared)).transpose(-1, -2) / math.sqrt(head_dim)
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ head(v, shared))
        x = x + linear(torch.cat(heads, dim=-1), f"blocks.{i}.self_attn.o_proj")
        entrance = norm(x, f"blocks.{i}.post_attention_layernorm")
        gate, up = (linear(entrance, f"blocks.{i}.mlp.{c}_proj") for c in ("gate", "up"))
        x = x + linear(gate * torch.sigmoid(gate) * up, f"blocks.{i}.mlp.down_proj")
    return linear(norm(x, "norm"), "lm_head")


def test_logits_equal_the_formulas_spelled_out():
    model = Llama(SMALL).double()
    with torch.no_grad():
        for param in model.parameters():  # values at which no term is negligible
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.3)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    # the angles are fp32 in the model, float64 in the reference
    torch.testing.assert_close(model(tokens), reference_logits(model.state_dict(), tokens, SMALL), rtol=1e-5, atol=1e-5)


def test_names_are_hugging_face_s_below_the_blocks():
    block = (
        "input_layernorm",
        *(f"self_attn.{c}_proj" for c in "qkvo"),
        "post_attention_layernorm",
        *(f"mlp.{c}_proj" for c in ("gate", "up", "down")),
    )
    blocks = [f"blocks.{i}.{name}.weight" for i in range(2) for name in block]
    wanted = ["embed_tokens.weight", *blocks, "norm.weight", "lm_head.weight"]
    model = Llama(SMALL)
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict()) != []
    assert sorted(model.state_dict()) == sorted(wanted)


def test_a_tied_head_is_the_token_embedding_counted_once():
    untied = LlamaConfig(vocab_size=61, seq_len=12, n_layer=1, n_head=4, n_kv_head=2, n_embd=32)
    tied = LlamaConfig(61, 12, 1, 4, 2, 32, tie_embeddings=True)
    models = Llama(untied), Llama(tied)
    assert models[1].lm_head.weight is models[1].embed_tokens.weight
    num_params = [sum(p.numel() for p in model.parameters()) for model in models]
    assert num_params[0] - num_params[1] == 61 * 32
    assert models[0].num_multiplied_params == models[1].num_multiplied_params
    by_other_name = torch.empty(61, 32)
    models[1].init_parameter("lm_head.weight", by_other_name)
    assert torch.equal(by_other_name, models[1].embed_tokens.weight)


def test_initial_values_are_normal_ones_and_smaller_into_the_residual_stream():
    model = Llama(LlamaConfig(500, 64, n_layer=8, n_head=4, n_kv_head=2, n_embd=128))
    for name, param in model.named_parameters():
        if "norm" in name:
            assert (param == 1).all(), name
        else:
            residual = "o_proj" in name or "down_proj" in name
            wanted = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            assert param.std().item() == pytest.approx(wanted, rel=0.03), name


@pytest.mark.parametrize(
    ("n_embd", "wanted"), [(320, 1024), (1152, 3072), (2048, 5632), (4096, 11008), (5120, 13824), (6656, 17920)]
)
def test_feed_forward_width_is_two_thirds_of_four_rounded_up(n_embd, wanted):
    assert LlamaConfig(61, 12, 1, 2, 1, n_embd).ffn_width == wanted
