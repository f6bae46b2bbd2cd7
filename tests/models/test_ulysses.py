"""Sequences that ranks share: losses and gradients of one process, whatever the model, the ranks and the documents."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from hf_models import (
    hf_folder,  # noqa: F401 -- a fixture
    make_model,
)
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.models import GPT2Config, LlamaConfig, SequenceParallel, share_sequences
from zeroshard.models.adapters import Lora
from zeroshard.models.hugging_face.config import config_of
from zeroshard.models.lora import built_with_lora
from zeroshard.train.setup.compiled import compile_model
from zeroshard.zero import Zero

VOCAB, SEQ_LEN, EOS, IGNORED = 61, 16, 5, -100
SIZES = {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "n_layer": 2, "n_head": 4, "n_embd": 32}
OURS = {
    "gpt2": GPT2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, n_kv_head=2, ffn_hidden=48),  # 4 ranks copy its heads of keys and values
}
THEIRS = ("llama", "llama eager", "gpt2", "qwen3", "gemma3_text", "mistral", "phi3", "olmo2")
# of each: ranks that share a sequence, and settings of the model
SHARING = {
    "over 2": (2, {}),
    "over 4": (4, {}),
    "all over 2": (2, {"activation_checkpointing": "offload", "tiles": "3"}),
}
# where two ranks have a sequence each
ALONE = {
    "offload": {"activation_checkpointing": "offload"},
    "tiles 1": {"activation_checkpointing": "full", "tiles": "1"},
    "tiles 2": {"activation_checkpointing": "full", "tiles": "2"},
    "tiles 7": {"activation_checkpointing": "offload", "tiles": "7"},
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


def ours(kind, way, **changes):
    return _built(partial(replace(OURS[kind], **changes).build, seed=1), way)


def theirs(folder, attention, way, **changes):
    return _built(config_of(f"hf:{folder}", {"attention": attention, **changes}).build, way)


def _built(build, way, dropout=0.0):
    if way != "lora":
        model = build().eval()  # GPT-2 of `transformers` has dropout
        model.eos_id = EOS if way == "separated" else None
        return model
    model = built_with_lora(build, Lora(rank=2, dropout=dropout, targets=("all-linear",)))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.normal_(generator=torch.Generator().manual_seed(len(name))).mul_(0.1)
    return model.eval()


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


def shared(comm, models, way, size, stage):
    """One rank's loss of its part, and the averaged gradients: as a trainer weights losses by targets."""
    model = models[comm.rank]
    cut = lambda *tensors: tuple(each[comm.rank : comm.rank + 1] for each in tensors)  # noqa: E731
    if size > 1:
        sequence = SequenceParallel.of(comm, size)
        share_sequences(model, sequence)
        cut = sequence.cut
    zero = Zero(model, stage, comm=comm, units=model.units)
    (tokens, targets), named = given(way, cut)
    own, total = (targets != IGNORED).sum(), (rows()[1] != IGNORED).sum()
    if not own:
        targets = targets.clone()
        targets[0, 0] = 0
    loss = model(tokens, targets, **named) * (own * max(size, 2) / total)
    loss.backward()
    return loss.detach(), {name: grad for name, grad in zero.full_grads().items() if grad is not None}


def assert_equal_to_one_process(build, way, size, stage, world=None, **changes):
    loss, grads = one_process(build, way)
    models = [build(way, **changes) for _ in range(world or max(size, 2))]
    found = run_threads(partial(shared, models=models, way=way, size=size, stage=stage), len(models))
    torch.testing.assert_close(sum(each[0] for each in found) / len(found), loss, rtol=2e-6, atol=0)
    for _, theirs in found:
        assert theirs.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(theirs[name], grad, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.pairwise("kind")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("lever", [*SHARING, *ALONE])
@pytest.mark.parametrize("kind", OURS)
def test_our_models_have_the_loss_and_gradients_of_one_process(kind, lever, stage, way):
    size, changes = SHARING[lever] if lever in SHARING else (1, ALONE[lever])
    assert_equal_to_one_process(BUILDERS[kind], way, size, stage, **changes)


@pytest.mark.pairwise("kind")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("lever", SHARING)
@pytest.mark.parametrize("kind", THEIRS)
def test_models_of_transformers_have_the_loss_and_gradients_of_one_process(builder, kind, lever, stage, way):
    size, changes = SHARING[lever]
    assert_equal_to_one_process(builder(kind), way, size, stage, **changes)


@pytest.mark.redundant(
    but=[
        "llama-offload-1-plain",
        "llama eager-tiles 1-3-packed",
        "gpt2-tiles 2-1-separated",
        "gemma3_text-offload-3-separated",
        "phi3-tiles 2-3-plain",
        "olmo2-tiles 7-1-packed",
    ]
)
@pytest.mark.pairwise("kind")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("lever", ALONE)
@pytest.mark.parametrize("kind", THEIRS)
def test_models_of_transformers_in_tiles_have_the_loss_and_gradients_of_one_process(builder, kind, lever, stage, way):
    assert_equal_to_one_process(builder(kind), way, 1, stage, **ALONE[lever])


@pytest.fixture(scope="module")
def builder(hf_folder):  # noqa: F811
    """`builder(kind)`: of a model, and the same one each time: results of one process are kept by it."""

    @cache
    def of(kind):
        name, _, attention = kind.partition(" ")
        return partial(theirs, hf_folder(name), attention or "auto")

    return of


BUILDERS = {kind: partial(ours, kind) for kind in OURS}


def test_selective_recomputation_runs_attention_of_shared_sequences_once():
    assert_equal_to_one_process(BUILDERS["gpt2"], "packed", 2, 3, activation_checkpointing="selective")


def test_ranks_of_a_sequence_that_were_given_other_rows_are_told_so():
    def cut(comm):
        sequence = SequenceParallel.of(comm, 2)
        with pytest.raises(
            ValueError, match=r"the ranks of a sequence were given different rows; give all of them the"
        ):
            sequence.cut(torch.full((1, 4), comm.rank))
        return int(sequence.cut(torch.full((1, 4), comm.rank // 2))[0][0, 0])

    assert run_threads(cut, 4) == [0, 0, 1, 1]


def test_a_loss_that_balances_experts_over_a_batch_is_refused():
    model = OURS["llama"].build()
    model.balances_experts = True
    with pytest.raises(UserError, match=r"sequence_parallel: the loss of a Llama balances experts over all tokens"):
        share_sequences(model, SequenceParallel(NullCommunicator(2)))


def test_heads_of_keys_that_ranks_do_not_divide_are_copied():
    config = replace(OURS["llama"], n_head=6, n_kv_head=3, n_embd=36)
    assert_equal_to_one_process(partial(_built, partial(config.build, seed=1)), "plain", 2, 1)


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


@pytest.mark.parametrize("size", [2, 4])
def test_a_mean_over_all_targets_is_the_mean_of_the_ranks_shares(size):
    losses, targets = torch.arange(16.0).view(2, 8), torch.ones(2, 8)
    targets[0, [0, 1, 5]] = targets[1, 2] = IGNORED

    def share(comm):
        sequence = SequenceParallel.of(comm, size)
        first = comm.rank // size  # with 2 ranks to a row each pair has another one
        own, wanted = sequence.cut(losses[first : first + 1], targets[first : first + 1])
        return sequence.mean(own[wanted != IGNORED].sum(), wanted)

    counted = (losses if size == 2 else losses[:1])[(targets if size == 2 else targets[:1]) != IGNORED]
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


def test_a_model_of_transformers_in_a_loop_of_ones_own():
    """Plain modules, shifted labels, `SequenceParallel.mean`, text while paused; and what would be silently wrong."""
    models = [make_model("qwen3") for _ in range(3)]
    ids = torch.randint(3, VOCAB, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = ids[:, :-1], ids[:, 1:]
    logits = models[2](input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    text = models[2].generate(tokens[:, :4], max_new_tokens=3, do_sample=False)

    def train(comm):
        model, sequence = models[comm.rank], SequenceParallel.of(comm, 2)
        share_sequences(model, sequence)
        own, wanted = sequence.cut(tokens, targets)
        found = model(input_ids=own, use_cache=False).logits
        share = sequence.mean(F.cross_entropy(found.flatten(0, 1), wanted.flatten(), reduction="sum"), wanted)
        for wrong in ({"labels": wanted}, {"use_cache": True}):
            with pytest.raises(UserError, match=r"labels would be shifted inside|has no cache; generate inside"):
                model(input_ids=own, **wrong)
        with sequence.paused():
            assert torch.equal(model.generate(tokens[:, :4], max_new_tokens=3, do_sample=False), text)
        return share.detach(), found.detach()

    first, second = run_threads(train, 2)
    torch.testing.assert_close((first[0] + second[0]) / 2, loss)
    torch.testing.assert_close(torch.cat([first[1], second[1]], dim=1), logits)


def test_generating_from_a_rank_s_part_is_refused():
    model, sequence, ids = make_model("llama"), SequenceParallel(NullCommunicator(2)), rows()[0][:, :4]
    share_sequences(model, sequence)
    for how in ({}, {"use_cache": False}):
        with pytest.raises(UserError, match=r"generate\(\) takes a prompt, .*; generate inside of `with"):
            model.generate(ids, max_new_tokens=2, do_sample=False, **how)
        with sequence.paused():
            assert model.generate(ids, max_new_tokens=2, min_new_tokens=2, **how).shape == (2, 6)


def test_models_that_mix_tokens_elsewhere_are_refused():
    sequence = SequenceParallel(NullCommunicator(2))
    model = make_model("llama")
    model.config.layer_types = ["full_attention", "conv"]
    with pytest.raises(UserError, match=r"sequence_parallel: a LlamaForCausalLM has layers of 'conv', which see other"):
        share_sequences(model, sequence)
    model = make_model("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match=r"model\.attention: flex_attention is not divided .*choose sdpa or eager"):
        share_sequences(model, sequence)
    with pytest.raises(TypeError, match=r"sequences of a Linear cannot be shared here: it is no model of transformers"):
        share_sequences(torch.nn.Linear(2, 2), sequence)
    sinks = make_model("gpt_oss", head_dim=4, num_local_experts=2, num_experts_per_tok=1)
    sinks.set_attn_implementation("eager")
    share_sequences(sinks, sequence)
    with pytest.raises(UserError, match=r"the attention of a GptOssAttention computes with s_aux of all heads"):
        sinks(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)


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


@pytest.mark.redundant
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # torch's compiler looks at the block's input
@pytest.mark.parametrize("how", ["none", "full", "offload"])
def test_compiled_blocks_are_graphs_before_and_after_attention(how):
    config = replace(OURS["llama"], activation_checkpointing=how)
    tokens, targets, _ = SequenceParallel(NullCommunicator(2)).cut(*rows())
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = config.build(seed=1)
        model.share_sequences(SequenceParallel(NullCommunicator(2)))
        if compiled:
            compile_model(model, "aot_eager", torch.device("cpu"))
        model(tokens, targets).backward()
        found.append([param.grad for param in model.parameters()])
    assert counters["stats"]["unique_graphs"] >= 2
    torch.testing.assert_close(found[1], found[0])
