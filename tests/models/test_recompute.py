import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zeroshard.models import GPT2, GPT2Config, build_model
from zeroshard.models.recompute import recompute_blocks

DEEP = GPT2Config(vocab_size=61, seq_len=12, n_layer=4, n_head=4, n_embd=32)


def _gradients(model):
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.redundant
@pytest.mark.parametrize("how", ["full", "selective", "selective:2", "every:1", "every:2"])
def test_recomputing_changes_no_bit_of_loss_or_gradients(config, build, batch, how):
    plain, recomputing = build(config), build(replace(config, activation_checkpointing=how))
    losses = [model(*batch) for model in (plain, recomputing)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    expected = _gradients(plain)
    assert all(torch.equal(grad, expected[name]) for name, grad in _gradients(recomputing).items())


def _runs_of_each_block(model, batch):
    """How often each block's first norm ran in forward and backward."""
    runs = [0] * len(model.blocks)

    def counter(place):
        def count(*_):
            runs[place] += 1

        return count

    for place, block in enumerate(model.blocks):
        next(block.children()).register_forward_pre_hook(counter(place))
    loss = model(*batch)
    if loss.requires_grad:
        loss.backward()
    return runs


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("how", "runs"),
    [
        ("none", [1, 1, 1, 1]),
        ("full", [2, 2, 2, 2]),
        ("selective", [2, 2, 2, 2]),
        ("every:2", [2, 1, 2, 1]),
        ("every:3", [2, 1, 1, 2]),
        ("every:9", [2, 1, 1, 1]),
    ],
)
def test_the_blocks_that_were_asked_for_run_again_where_gradients_are_wanted(how, runs, batch):
    model = GPT2(replace(DEEP, activation_checkpointing=how))
    assert _runs_of_each_block(model, batch) == runs
    with torch.no_grad():
        assert _runs_of_each_block(GPT2(replace(DEEP, activation_checkpointing=how)), batch) == [1, 1, 1, 1]


@pytest.mark.redundant
def test_selective_repeats_no_matrix_product(batch):
    flops = {}
    for how in ("none", "selective", "full"):
        model = GPT2(replace(DEEP, activation_checkpointing=how))
        with FlopCounterMode(display=False) as counter:
            model(*batch).backward()
        flops[how] = counter.get_total_flops()
    assert flops["none"] == flops["selective"] < flops["full"]


@pytest.mark.redundant(but=["gpt2-demo"])
@pytest.mark.parametrize("name", ["gpt2-demo", "llama-tiny"])
def test_selective_2_keeps_every_second_product_and_says_how_many_flops_run_again(name):
    flops, kept = {}, {}
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    for how in ("selective", "selective:2", "full"):
        model = build_model(name, overrides={"activation_checkpointing": how, "vocab_size": 64, "n_layer": 2})
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
        flops[how], kept[how] = counter.get_total_flops(), model.num_recomputed_flops_per_token(16)
    assert flops["selective:2"] - flops["selective"] == 16 * kept["selective:2"] > 0
    assert flops["selective:2"] < flops["full"]


@pytest.fixture
def attention_that_draws():
    """The GPU's attention operation on the CPU: not attention, but dropout of the values, which draws as it does."""

    def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        mask = torch.rand(v.shape) >= dropout_p
        none = torch.empty(0)
        return v * mask, none, none, none, v.shape[2], v.shape[2], mask, none, none

    def backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, mask, unused, scale=None):
        return torch.zeros_like(q), torch.zeros_like(k), grad * mask

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    yield torch.ops.aten._scaled_dot_product_flash_attention.default
    library._destroy()


class _DrawsTwice(nn.Module):
    """A block with dropout inside attention and after it."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return F.dropout(self.attention(x, x, x, 0.5)[0].sin(), 0.5)


@pytest.mark.parametrize("how", ["full", "selective", "selective:2"])
def test_dropout_after_attention_that_draws_has_the_same_masks_in_both_runs(attention_that_draws, how):
    gradients = []
    for again in ("none", how):
        block = _DrawsTwice(attention_that_draws)
        recompute_blocks([block], again, random=True)
        torch.manual_seed(5)
        x = torch.ones(1, 1, 64, 8, requires_grad=True)
        block(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_copy_of_a_model_runs_its_own_blocks(batch):
    model = GPT2(replace(DEEP, activation_checkpointing="full"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    other(*batch).backward()
    assert torch.equal(other(*batch), GPT2(DEEP)(*batch))
    assert all(param.grad is None for param in model.parameters())
    assert all(param.grad is not None for param in other.parameters())


@pytest.mark.redundant
@pytest.mark.parametrize("name", ["gpt2-124m", "llama-1b"])
def test_a_whole_second_forward_is_a_third_of_the_models_flops_less_the_heads(name):
    def model(how):
        with torch.device("meta"):
            return build_model(name, overrides={"activation_checkpointing": how})

    full = model("full")
    config, seq_len = full.config, 1024
    forward = full.num_flops_per_token(seq_len) // 3
    head = 2 * config.vocab_size * config.n_embd
    assert full.num_recomputed_flops_per_token(seq_len) == pytest.approx(forward - head, rel=1e-5)
    every_fourth = model("every:4").num_recomputed_flops_per_token(seq_len)
    assert every_fourth * 4 == full.num_recomputed_flops_per_token(seq_len)
    assert model("none").num_recomputed_flops_per_token(seq_len) == 0
    assert model("selective").num_recomputed_flops_per_token(seq_len) == 0
