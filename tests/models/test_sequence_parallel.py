"""Sequences that ranks share: losses and gradients of one process, whatever the model, the ranks and the documents."""

from functools import cache, partial

import pytest
import torch

from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.errors import UserError
from zeroshard.models import GPT2Config, LlamaConfig, SequenceParallel
from zeroshard.models.adapters import Lora
from zeroshard.models.lora import built_with_lora
from zeroshard.zero import Zero

VOCAB, SEQ_LEN, EOS, IGNORED = 61, 16, 5, -100
SIZES = {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "n_layer": 2, "n_head": 4, "n_embd": 32}
OURS = {
    "gpt2": GPT2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, n_kv_head=2, ffn_hidden=48),  # 4 ranks copy its heads of keys and values
    "llama tiles": LlamaConfig(**SIZES, n_kv_head=1, ffn_hidden=48, activation_checkpointing="offload", tiles="3"),
    "gpt2 selective": GPT2Config(**SIZES, activation_checkpointing="selective"),
}
WAYS = ("plain", "packed", "separated", "lora")


def rows():
    """Tokens, targets and positions of two rows: examples that ranks' borders cut, and parts without any target."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCAB, (2, SEQ_LEN + 1), generator=generator)
    ids[:, 3] = ids[1, 9] = EOS
    tokens, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[:, 8:12] = targets[0, :7] = IGNORED
    positions = torch.stack([torch.cat([torch.arange(6), torch.arange(10)]), torch.arange(16)])
    return tokens, targets, positions


def ours(kind, way):
    def build():
        return OURS[kind].build(seed=1)

    if way != "lora":
        model = build()
        model.eos_id = EOS if way == "separated" else None
        return model
    model = built_with_lora(build, Lora(rank=2))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.normal_(generator=torch.Generator().manual_seed(len(name))).mul_(0.1)
    return model


def given(way, cut=lambda *tensors: tensors):
    tokens, targets, positions = cut(*rows())
    return (tokens, targets), {"positions_BT": positions} if way == "packed" else {}


@cache
def one_process(build, way):
    """The loss of whole rows and its gradients, by name."""
    model = build(way)
    batch, named = given(way)
    loss = model(*batch, **named)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.requires_grad}


def shared(comm, build, way, size, stage):
    """One rank's loss of its part, and the averaged gradients: as a trainer weights losses by targets."""
    model = build(way)
    sequence = SequenceParallel.of(comm, size)
    model.share_sequences(sequence)
    zero = Zero(model, stage, comm=comm, units=model.units)
    (tokens, targets), named = given(way, sequence.cut)
    own, total = (targets != IGNORED).sum(), (rows()[1] != IGNORED).sum()
    if not own:
        targets = targets.clone()
        targets[0, 0] = 0
    loss = model(tokens, targets, **named) * (own * size / total)
    loss.backward()
    return loss.detach(), {name: grad for name, grad in zero.full_grads().items() if grad is not None}


def assert_equal_to_one_process(build, way, size, stage, world=None):
    loss, grads = one_process(build, way)
    found = run_threads(partial(shared, build=build, way=way, size=size, stage=stage), world or size)
    torch.testing.assert_close(sum(each[0] for each in found) / len(found), loss, rtol=2e-6, atol=0)
    for _, theirs in found:
        assert theirs.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(theirs[name], grad, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "stage"), [(2, 1), (2, 3), (4, 1), (4, 3)])
@pytest.mark.parametrize("kind", OURS)
def test_our_models_have_the_loss_and_gradients_of_one_process(kind, size, stage, way):
    assert_equal_to_one_process(BUILDERS[kind], way, size, stage)


BUILDERS = {kind: partial(ours, kind) for kind in OURS}


def test_two_sequences_are_shared_by_two_ranks_each():
    assert_equal_to_one_process(BUILDERS["llama"], "packed", 2, 2, world=4)


def test_ranks_get_neighbouring_parts_and_gather_them_again():
    def parts(comm):
        sequence = SequenceParallel.of(comm, 2)
        whole = torch.arange(12).view(2, 6) + 100 * (comm.rank // 2)
        (part,) = sequence.cut(whole)
        return part, torch.equal(sequence.gather(part), whole), sequence.first(part.shape[1])

    found = run_threads(parts, 4)
    assert found[0][0].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert found[3][0].tolist() == [[103, 104, 105], [109, 110, 111]]
    assert [each[1:] for each in found] == [(True, 0), (True, 3)] * 2


def test_a_mean_over_all_targets_is_the_mean_of_the_ranks_shares():
    losses, targets = torch.arange(8.0).view(1, 8), torch.tensor([[IGNORED, IGNORED, 1, 1, 1, IGNORED, 1, 1]])

    def share(comm):
        sequence = SequenceParallel.of(comm, 4)
        own, wanted = sequence.cut(losses, targets)
        return sequence.mean(own[wanted != IGNORED].sum(), wanted)

    counted = losses[targets != IGNORED]
    assert sum(run_threads(share, 4)) / 4 == counted.mean()


def test_while_paused_and_with_a_cache_each_rank_computes_whole_sequences():
    tokens = rows()[0]
    wanted = ours("llama", "plain")(tokens)

    def generate(comm):
        model = ours("llama", "plain")
        sequence = SequenceParallel.of(comm, 2)
        model.share_sequences(sequence)
        with torch.no_grad():
            cached = model(tokens, cache=model.new_cache())
            with sequence.paused():
                return cached, model(tokens)

    for logits in (each for found in run_threads(generate, 2) for each in found):
        torch.testing.assert_close(logits, wanted)


def test_what_cannot_be_shared_is_one_line():
    with pytest.raises(
        UserError, match="sequence_parallel: 8 ranks do not divide 4 query heads; choose one of 1, 2, 4"
    ):
        OURS["gpt2"].build().share_sequences(SequenceParallel(NullCommunicator(8)))
    with pytest.raises(UserError, match="groups of 3 ranks that share a sequence do not partition a world of 4"):
        SequenceParallel.of(NullCommunicator(4), 3)
    four = SequenceParallel(NullCommunicator(4))
    with pytest.raises(UserError, match="seq_len: 2 tokens are fewer than the 4 ranks that share them"):
        four.cut(torch.zeros(1, 2))
    with pytest.raises(UserError, match=r"seq_len: 18 tokens cannot be cut into 4 equal parts .*give 16 or 20"):
        four.cut(torch.zeros(1, 18))
