"""What a model computes with the length of its row, over ranks that share it: as on one rank, or refused in a line."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F

from hf_models import make_model
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.models import LlamaConfig, SequenceParallel, share_sequences
from zeroshard.models.llama import Llama
from zeroshard.zero import Zero

TOKENS, THRESHOLD = 24, 16  # of a row, of which a rank of two has 12
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
LONGROPE |= {"original_max_position_embeddings": THRESHOLD}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
KINDS = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": THRESHOLD},
    "qwen2": {"rope_parameters": DYNAMIC, "max_position_embeddings": THRESHOLD},
    "olmo3": {  # frequencies by kind of layer
        "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC},
        "max_position_embeddings": THRESHOLD,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4_text": {"head_dim": 4, "no_rope_layers": [0, 1], "floor_scale": 5, "intermediate_size_mlp": 8},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 24},  # whose base model is not called
    "roberta": {"is_decoder": True},  # positions from the id of padding on
}


def ids(num_tokens=TOKENS, rows=2):
    return torch.randint(3, 97, (rows, num_tokens), generator=torch.Generator().manual_seed(0))


def logits_and_grads(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def shared(whole, rank_does, size=2, world=2, **named):
    """What `rank_does(model, sequence)` returns on each rank, with models that share sequences."""

    def rank(comm):
        model, sequence = copy.deepcopy(whole), SequenceParallel.of(comm, size, **named)
        share_sequences(model, sequence)
        return rank_does(model, sequence)

    return run_threads(rank, world)


@pytest.mark.parametrize("kind", KINDS)
def test_models_whose_mathematics_follows_the_row_are_those_of_one_rank(kind):
    whole = make_model(kind, **KINDS[kind])
    logits, grads = logits_and_grads(copy.deepcopy(whole), ids())
    found = shared(whole, lambda model, sequence: logits_and_grads(model, *sequence.cut(ids())))
    torch.testing.assert_close(torch.cat([each for each, _ in found], dim=1), logits, rtol=2e-6, atol=2e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(sum(each[name] for _, each in found), grad, rtol=2e-5, atol=2e-4, msg=name)


class _Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.1 if x.shape[1] > THRESHOLD else 1.0)


class _Mixing(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x + 0.1 * F.pad(x, (0, 0, 1, 0))[:, :-1])


def changed(place, kind):
    """A LLaMA with another layer at this place."""
    model = make_model("llama", initializer_range=0.002)
    old = model.get_submodule(place)
    new = kind(old.in_features, old.out_features, bias=False)
    new.load_state_dict(old.state_dict())
    model.set_submodule(place, new)
    return model


@pytest.mark.parametrize(
    ("make", "length", "line"),
    [
        (lambda: changed("model.layers.1.self_attn.q_proj", _Scaled), TOKENS, r"queries in attention 2 \(by 9\.1 % on"),
        (lambda: changed("model.layers.0.mlp.up_proj", _Mixing), THRESHOLD, r"output \(by .* % on rank 1\)"),
        (lambda: make_model("doge"), THRESHOLD, r"a DogeForCausalLM computes whole rows alone \(.*\)"),
    ],
)
def test_what_ranks_compute_otherwise_is_refused_before_the_first_longer_row(make, length, line):
    """With figures of the rank that differs most; rows up to the threshold are what they are on one rank."""
    whole = make()

    def refusal(model, sequence):
        for each in (THRESHOLD, TOKENS):
            try:
                model(input_ids=sequence.cut(ids(each))[0], use_cache=False)
            except UserError as error:
                return each, str(error)
        return None

    for refused_at, words in shared(whole, refusal):
        assert refused_at == length
        assert re.fullmatch(rf"sequence_parallel: .*{line}.*; leave it out, or take another model", words), words


class _Stretched(Llama):
    """A model of one's own that extends one of ours, and rotates less in longer rows."""

    def with_positions(self, x, num_seen, positions):
        x, cos, sin = super().with_positions(x, num_seen, positions)
        return x, *((cos, sin) if x.shape[1] <= THRESHOLD else (cos.clone().fill_(1.0), sin * 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_extend_one_of_ours_are_compared_too(dtype):
    """Whose initial weights are so small that logits hardly show it."""
    config = LlamaConfig(vocab_size=61, seq_len=TOKENS, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    whole = _Stretched(config).to(dtype)

    def refusal(model, sequence):
        model(sequence.cut(ids(THRESHOLD) % 61)[0])
        with pytest.raises(
            UserError, match=r"other queries in attention 1 \(by .* % on rank \d\) than one rank, in a row"
        ):
            model(sequence.cut(ids() % 61)[0])

    shared(whole, refusal)


def test_a_row_that_is_longer_than_said_is_refused_and_the_longest_is_compared_at_once():
    def compare(model, sequence):
        model(input_ids=sequence.cut(ids(8))[0], use_cache=False)
        with pytest.raises(
            UserError, match=r"longest: a row of 32 tokens is longer than the 24 that were compared; give S"
        ):
            model(input_ids=sequence.cut(ids(32))[0], use_cache=False)
        return sequence.num_compared

    assert shared(make_model("llama"), compare, longest=TOKENS) == [1, 1]
    with pytest.raises(UserError, match=r"other queries in attention 2 .* in a row of 24 tokens"):
        shared(changed("model.layers.1.self_attn.q_proj", _Scaled), compare, longest=TOKENS)


def test_of_rows_too_long_to_be_computed_whole_positions_reach_their_end(monkeypatch):
    """The row is a shorter one then; longrope would be seen as in the row itself."""
    monkeypatch.setattr("zeroshard.models.sequence_comparison.LONGEST_ROW", 8)
    seen = []
    phi = make_model("phi3", **KINDS["phi3"])
    phi.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, named: seen.append(named["position_ids"].tolist()), with_kwargs=True
    )
    whole = copy.deepcopy(phi)
    shared(whole, lambda model, sequence: model(input_ids=sequence.cut(ids(TOKENS))[0], use_cache=False).logits)
    assert [[0, 1, 2, 3, 20, 21, 22, 23]] in seen


def test_a_comparison_leaves_nothing_behind():
    """Modules that were in evaluation mode, frequencies that have not grown yet, random numbers."""
    whole = make_model("qwen2", **KINDS["qwen2"])

    def compare(model, sequence):
        model.train()
        model.model.layers[0].eval()
        before = torch.get_rng_state()
        model(input_ids=sequence.cut(ids())[0], position_ids=torch.arange(TOKENS // 2)[None], use_cache=False)
        rotary = model.model.rotary_emb
        return (
            [each.training for each in model.model.layers],
            float((rotary.inv_freq - rotary.original_inv_freq).abs().max()),
            torch.equal(before, torch.get_rng_state()),
        )

    assert shared(whole, compare) == [([False, True], 0.0, True)] * 2


@pytest.mark.redundant(but=["base model-3"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("part", ["model", "base model"])
def test_rows_of_any_length_in_each_group_of_ranks_train_as_on_one_rank(stage, part):
    """Two groups of two ranks, of which one or the other has a longer row than before, in a loop of one's own."""
    whole = make_model("phi3", **KINDS["phi3"])
    lengths = [(8, 8), (16, 8), (8, 20), (24, 24), (12, 24)]

    def computed(model, tokens):
        if part == "model":
            return model(input_ids=tokens, use_cache=False).logits
        return model.model(input_ids=tokens, use_cache=False).last_hidden_state

    alone, wanted = copy.deepcopy(whole), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.02)
    for pair in lengths:
        loss = sum(computed(alone, ids(each, 1)).square().sum() for each in pair) / sum(pair)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))

    def rank(comm):
        model, sequence = copy.deepcopy(whole), SequenceParallel.of(comm, 2)
        share_sequences(model, sequence)
        zero = Zero(model, stage, comm=comm, units=model.model.layers)
        optimizer, found = zero.optimizer(torch.optim.SGD, lr=0.02), []
        for pair in lengths:
            (own,) = sequence.cut(ids(pair[comm.rank // 2], 1))
            loss = computed(model, own).square().sum() / sum(pair) * comm.world_size
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()) / comm.world_size)
        return found, sequence.num_compared

    ranks = run_threads(rank, 4)
    assert [sum(each) for each in zip(*(found for found, _ in ranks), strict=True)] == pytest.approx(wanted, rel=1e-5)
    # where weights are sharded all compare if any does
    assert [number for _, number in ranks] == ([4] * 4 if stage == 3 else [3, 3, 3, 3])
