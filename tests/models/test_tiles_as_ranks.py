"""Tiles as ranks in a loop of one's own, and what cannot be computed tile by tile."""

import copy

import pytest
import torch
from torch import nn

from hf_models import make_model
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.errors import UserError
from zeroshard.models import LlamaConfig, SequenceParallel, share_sequences
from zeroshard.zero import Zero

SIZES = {"vocab_size": 61, "seq_len": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "ffn_hidden": 48}
CONFIG = LlamaConfig(**SIZES, activation_checkpointing="full")
IDS = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(3))


def _step(comm, size, tiles):
    """Gradients of one step of plain AdamW, and the weights after it."""
    model = CONFIG.build(seed=1)
    sequence = SequenceParallel.of(comm, size, tiles=tiles)
    share_sequences(model, sequence)
    zero = Zero(model, 2, comm=comm, units=model.blocks, reproducible=4)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = model(*sequence.cut(IDS[:, :-1], IDS[:, 1:]))
    assert losses.shape == (() if tiles == 1 else (tiles,))
    sequence.as_ranks.backward(losses.mean())
    optim.step()
    return zero.state_dict()


def test_a_loop_of_ones_own_has_the_bits_of_ranks():
    (wanted,) = {_told(each) for each in run_threads(lambda comm: _step(comm, 4, 1), 4)}
    assert _told(_step(LocalCommunicator(), 1, 4)) == wanted


def _told(weights):
    return str([(name, each.tolist()) for name, each in weights.items()])


def test_a_plain_backward_gives_the_sum_of_the_tiles_and_reproducible_steps_refuse_it():
    whole = CONFIG.build(seed=1)
    whole(IDS[:, :-1], IDS[:, 1:]).backward()
    model = CONFIG.build(seed=1)
    sequence = SequenceParallel(LocalCommunicator(), tiles=4)
    share_sequences(model, sequence)
    for each in (model, copy.deepcopy(model)):
        each(IDS[:, :-1], IDS[:, 1:]).mean().backward()
        for name, param in each.named_parameters():
            torch.testing.assert_close(param.grad, whole.get_parameter(name).grad, rtol=2e-5, atol=2e-6)
    model.zero_grad()
    zero = Zero(model, 1, units=model.blocks, reproducible=4)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    model(IDS[:, :-1], IDS[:, 1:]).mean().backward()
    with pytest.raises(RuntimeError, match=r"1 backwards .* are no multiple of reproducible=4; have 4"):
        optim.step()


def test_text_is_generated_of_whole_rows():
    model = CONFIG.build(seed=1).eval()
    with torch.no_grad():
        wanted = model(IDS[:, :5])
        sequence = SequenceParallel(LocalCommunicator(), tiles=4)
        share_sequences(model, sequence)
        torch.testing.assert_close(model(IDS[:, :5], cache=model.new_cache()), wanted)
        with sequence.paused():
            assert torch.equal(model(IDS[:, :5]), wanted)
        with pytest.raises(UserError, match=r"seq_len: 5 tokens cannot be cut into 4 equal tiles .*; give a multiple"):
            model(IDS[:, :5])


def test_generating_from_a_rank_s_part_is_refused():
    model = make_model("llama")
    sequence = SequenceParallel(LocalCommunicator(), tiles=2)
    share_sequences(model, sequence)
    for how in ({}, {"use_cache": False}):
        with pytest.raises(
            UserError, match=r"generate\(\) takes a prompt, .*; generate inside of `with sequence.paused"
        ):
            model.generate(IDS[:, :4], max_new_tokens=2, do_sample=False, **how)
        with sequence.paused():
            assert model.generate(IDS[:, :4] + 1, max_new_tokens=2, min_new_tokens=2, **how).shape == (2, 6)


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(1)), nn.Linear(32, 32)


def test_modules_that_see_no_single_tokens_are_named():
    mixture = make_model("mixtral", num_local_experts=2, num_experts_per_tok=1)
    share_sequences(mixture, SequenceParallel(LocalCommunicator(), tiles=2))
    with pytest.raises(UserError, match=r"tiles: model.layers.0.*, is given \[.*, and not \[B, T, ...\] of 16 tokens"):
        mixture(input_ids=IDS[:, :-1], use_cache=False)
    model = CONFIG.build(seed=1)
    model.blocks[0].mlp = _Scaled()
    with pytest.raises(UserError, match=r"tiles: blocks.0.mlp, a _Scaled, has parameters and calls other modules"):
        share_sequences(model, SequenceParallel(LocalCommunicator(), tiles=2))
