"""Tiles as ranks in a loop of one's own, and what cannot be computed tile by tile."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_models import make_model
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.errors import UserError
from zeroshard.models import GPT2Config, LlamaConfig, SequenceParallel, share_sequences
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


DROPS = GPT2Config(61, 16, n_layer=2, n_head=4, n_embd=32, dropout=0.3)


def _drawn(config, seeds=(5, 6), micro_batches=1):
    """Losses and gradients of a GPT-2 with dropout, of two tiles; of several forwards before their backwards."""
    model = config.build(seed=1)
    sequence = SequenceParallel(LocalCommunicator(), tiles=2)
    share_sequences(model, sequence)
    sequence.as_ranks.seed(seeds)
    before = torch.get_rng_state()
    losses = [model(IDS[:, :-1], IDS[:, 1:]) for _ in range(micro_batches)]
    for each in losses:
        sequence.as_ranks.backward(each.mean())
    assert torch.equal(torch.get_rng_state(), before)
    return [each.tolist() for each in losses], [param.grad for param in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("how", "tiles"), [("full", "none"), ("offload", "none"), ("full", "2"), ("selective", "none")]
)
def test_blocks_that_run_again_draw_what_each_tile_has_drawn(how, tiles, micro_batches):
    kept = _drawn(DROPS, micro_batches=micro_batches)
    again = _drawn(replace(DROPS, activation_checkpointing=how, tiles=tiles), micro_batches=micro_batches)
    assert kept[0] == again[0]
    assert all(map(torch.equal, kept[1], again[1]))


def test_each_tile_draws_by_its_own_seed():
    (losses,), _ = _drawn(DROPS)
    (others,), _ = _drawn(DROPS, seeds=(5, 7))
    assert losses[0] != others[0], "attention sees both tiles"
    assert losses == _drawn(DROPS)[0][0]
    with torch.no_grad():
        model = DROPS.build(seed=1).eval()
        sequence = SequenceParallel(LocalCommunicator(), tiles=2)
        share_sequences(model, sequence)
        wanted = model(IDS[:, :-1], IDS[:, 1:])
        sequence.as_ranks.seed((5, 6))
        assert torch.equal(model(IDS[:, :-1], IDS[:, 1:]), wanted)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_random_numbers_that_are_no_tile_s_are_refused():
    tiles = SequenceParallel(LocalCommunicator(), tiles=2)
    model = DROPS.build(seed=1)
    share_sequences(model, tiles)
    with pytest.raises(UserError, match=r"tiles: the model draws .*; seed those of each tile by TilesAsRanks.seed, or"):
        model(IDS[:, :-1], IDS[:, 1:])
    with pytest.raises(ValueError, match=r"seed: 3 seeds for 2 tiles; give one for each tile"):
        tiles.as_ranks.seed((5, 6, 7))
    tiles.as_ranks.seed((5, 6))
    model.blocks[0].register_forward_hook(lambda block, given, output: F.dropout(output, 0.1))
    with pytest.raises(
        UserError, match=r"a GPT2 draws random numbers outside of modules that are computed tile by tile"
    ):
        model(IDS[:, :-1], IDS[:, 1:])
    theirs = make_model("gpt2").train()
    theirs.gradient_checkpointing_enable()
    tiles = SequenceParallel(LocalCommunicator(), tiles=2)
    share_sequences(theirs, tiles)
    tiles.as_ranks.seed((5, 6))
    with pytest.raises(UserError, match=r"blocks that recompute themselves do not draw again .*offload_inputs"):
        theirs(input_ids=IDS[:, :-1], use_cache=False).logits.sum().backward()


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
