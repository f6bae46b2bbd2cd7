import math

import pytest
import torch
from torch import nn

from zeroshard.kernels.rope import rotate
from zeroshard.models import Llama, LlamaConfig
from zeroshard.models.llama import Attention, rope_tables

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


def test_rotation_depends_on_the_distance_between_positions_alone():
    cos, sin = rope_tables(20, 8, 10_000.0, CPU)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    turned_q, turned_k = (rotate(x.expand(1, 1, 20, 8), cos, sin)[0, 0] for x in (q, k))
    scores = turned_q @ turned_k.T  # [position of q, position of k]
    for distance in (-7, -1, 0, 3, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores.diagonal(1)[0] != scores.diagonal(2)[0]


def test_rotation_keeps_lengths_and_leaves_position_zero_alone():
    cos, sin = rope_tables(20, 8, 10_000.0, CPU)
    x = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_rotation_returns_the_dtype_it_was_given():
    cos, sin = rope_tables(4, 8, 10_000.0, CPU)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert rotate(torch.ones(1, 1, 4, 8, dtype=dtype), cos, sin).dtype == dtype


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values():
    shape = {"vocab_size": 61, "seq_len": 12, "n_layer": 1, "n_head": 6, "n_embd": 24}
    grouped = Attention(LlamaConfig(n_kv_head=2, **shape), "reference")
    full = Attention(LlamaConfig(n_kv_head=6, **shape), "reference")
    with torch.no_grad():
        full.q_proj.weight.copy_(grouped.q_proj.weight)
        full.o_proj.weight.copy_(grouped.o_proj.weight)
        for ours, theirs in ((full.k_proj, grouped.k_proj), (full.v_proj, grouped.v_proj)):
            ours.weight.copy_(theirs.weight.view(2, 4, 24).repeat_interleave(3, dim=0).reshape(24, 24))
    cos, sin = rope_tables(10, 4, 10_000.0, CPU)
    x = torch.randn(2, 10, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grouped(x, cos, sin), full(x, cos, sin), rtol=1e-5, atol=1e-6)


def test_the_norm_is_x_over_the_root_of_its_mean_square_plus_eps():
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-2
    norm = Llama(LlamaConfig(61, 12, 1, 4, 2, 32, norm_eps=1e-4)).double().norm
    assert isinstance(norm, nn.RMSNorm)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 32))
    by_hand = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-4) * norm.weight
    torch.testing.assert_close(norm(x), by_hand, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(norm, x.requires_grad_())


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
    ("n_embd", "wanted"),
    [(320, 1024), (1152, 3072), (2048, 5632), (4096, 11008), (5120, 13824), (6656, 17920)],
)
def test_feed_forward_width_is_two_thirds_of_four_rounded_up(n_embd, wanted):
    assert LlamaConfig(61, 12, 1, 2, 1, n_embd).ffn_width == wanted


def test_a_given_feed_forward_width_is_taken_as_it_is():
    assert SMALL.ffn_width == 48
    assert Llama(SMALL).blocks[0].mlp.up_proj.weight.shape == (48, 32)
