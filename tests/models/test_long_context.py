"""Inputs of blocks on the host, feed-forward layers by tiles: same losses and gradients, and the bytes they promise."""

import copy
import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hf_models import batches, make_model
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.host.slab import room
from zeroshard.lab.predict.on_meta import in_recomputations, on_meta
from zeroshard.lab.predict.recorder import StorageEvents
from zeroshard.models import LlamaConfig, offload_inputs, tiles
from zeroshard.models.inputs_on_host import slot_bytes
from zeroshard.models.recompute import recompute_blocks
from zeroshard.models.tiles import bounds, num_tiles, tile_mlps, tiled
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.zero import Zero

DEEP = LlamaConfig(vocab_size=61, seq_len=12, n_layer=4, n_head=4, n_kv_head=2, n_embd=32)
SHALLOW = replace(DEEP, n_layer=2)  # to compile
KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "smollm3", "phi"]
INPUT_BYTES = 3 * 10 * 32 * 4  # of `batch` in DEEP's width


def gradients(model, *given, **named):
    """The loss of a batch and its gradients, by name."""
    model.zero_grad()
    loss = model(*given, **named)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.requires_grad}


def assert_close(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize(("how", "cut"), [("offload", "none"), ("full", "1")])
def test_inputs_on_the_host_and_one_tile_change_no_bit(config, build, batch, how, cut):
    plain, long = build(config), build(replace(config, activation_checkpointing=how, tiles=cut))
    found, wanted = gradients(long, *batch), gradients(plain, *batch)
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(found[1][name], grad) for name, grad in wanted[1].items())


def test_text_is_generated_by_tiles_alike(build, batch):
    plain, long = build(DEEP), build(replace(DEEP, activation_checkpointing="full", tiles="3"))
    with torch.no_grad():
        torch.testing.assert_close(long(*batch), plain(*batch))


@pytest.mark.redundant(but=["mistral"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_have_the_losses_and_gradients_of_whole_blocks(kind):
    model = make_model(kind).train()
    tokens, targets = next(iter(batches(1)))
    run = partial(gradients, input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False)
    wanted = run(copy.deepcopy(model))
    blocks = (model.model if hasattr(model, "model") else model.gpt_neox).layers
    assert len(tile_mlps(model, "3")) == len(blocks)
    offload_inputs(*blocks)
    assert_close(run(model), wanted)
    assert slot_bytes() > 0
    other = make_model(kind).train()  # as their own checkpointing, reentrant or not
    other.gradient_checkpointing_enable({"use_reentrant": False})
    offload_inputs(*(other.model if hasattr(other, "model") else other.gpt_neox).layers)
    runs = []
    first = next(other.named_parameters())[1]
    block = (other.model if hasattr(other, "model") else other.gpt_neox).layers[0]
    next(block.children()).register_forward_pre_hook(lambda *_: runs.append(first))
    assert_close(run(other), wanted)
    assert len(runs) == 2, "a block that recomputes itself must not be recomputed around that"


@pytest.mark.redundant
@pytest.mark.parametrize(("stage", "world"), [(1, 1), (1, 2), (3, 2)])
def test_ranks_may_cut_into_other_numbers_of_tiles(build, batch, stage, world):
    def train(comm, cut):
        changes = {} if cut is None else {"activation_checkpointing": "offload", "tiles": cut[comm.rank]}
        model = build(replace(DEEP, **changes))
        zero = Zero(model, stage, comm=comm, units=model.units)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        losses = []
        for _ in range(3):
            loss = model(*(part[comm.rank : comm.rank + 2] for part in batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    whole, cut = (run_threads(partial(train, cut=each), world) for each in (None, ["2", "5"]))
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=0)


def test_inputs_wait_in_exactly_their_bytes_of_the_host_and_the_last_ones_stays(build, batch):
    gc.collect()
    model = build(replace(DEEP, activation_checkpointing="offload"))
    assert slot_bytes() == 0
    for _ in range(2):
        model(*batch).backward()
        assert slot_bytes() == 3 * room(INPUT_BYTES)
    longer = torch.zeros(3, 12, dtype=torch.long)
    model(longer, longer).backward()  # too long for the slots: they are replaced one by one
    model(*batch).backward()
    assert slot_bytes() == 3 * room(3 * 12 * 32 * 4)
    del model
    gc.collect()
    assert slot_bytes() == 0


def test_forwards_that_are_dropped_retained_or_copied_keep_their_slots_apart(build, batch):
    model = build(replace(DEEP, activation_checkpointing="offload"))
    wanted = gradients(build(DEEP), *batch)[1]
    dropped = model(*batch)
    first, second = model(*batch), copy.deepcopy(model)(*batch)
    del dropped
    (first + 0 * second).backward(retain_graph=True)
    others = [model(*(part.flip(0) for part in batch)) for _ in range(4)]  # other inputs, in all slots that are free
    (0 * sum(others)).backward()
    first.backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, 2 * wanted[name], msg=name)


class _Writes(nn.Module):
    def forward(self, x):
        return x.mul_(2).sin()


def test_a_block_that_writes_into_its_input_is_told_so_and_nobody_else_is():
    blocks = [_Writes() for _ in range(3)]
    for block in blocks:
        offload_inputs(block)
    y = nn.Sequential(*blocks)(torch.ones(1, 4, 8, requires_grad=True).clone())
    others = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    offload_inputs(*others)
    others(torch.ones(1, 4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="offload_inputs: the input of a block was written to"):
        y.sum().backward()
    with pytest.raises(TypeError, match="give its input first, by position"):
        blocks[0](x=torch.ones(1, requires_grad=True))


@pytest.mark.redundant
@pytest.mark.parametrize("how", ["none", "full", "offload", "selective"])
def test_blocks_that_are_offloaded_twice_or_are_recomputed_already_run_forward_twice(build, batch, how):
    wanted = gradients(build(DEEP), *batch)
    model = build(replace(DEEP, activation_checkpointing=how))
    runs = []
    model.blocks[0].self_attn.register_forward_pre_hook(lambda *_: runs.append(how))
    for blocks in (model.blocks, [*model.blocks[2:], model.blocks[2]]):
        offload_inputs(*blocks)
    assert_close(gradients(model, *batch), wanted)
    assert len(runs) == 2


def test_what_is_never_called_has_no_input_to_offload(build):
    model = build(DEEP)
    for wrong in (model.blocks, list(model.blocks), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(
            TypeError, match=r"a (ModuleList|list|ModuleDict) is never called itself; give the blocks, as"
        ):
            offload_inputs(wrong)


def _peak(config, how, cut, length):
    """The most bytes of activations that are alive at once, in fp32 numbers per token and width, without values."""
    sizes, most = [0], [0]

    def changed(storage, change):
        sizes[0] += change
        most[0] = max(most[0], sizes[0])

    with on_meta():
        model = replace(config, activation_checkpointing=how, tiles=cut).build()
        in_recomputations(model, model.blocks)
        tokens = torch.zeros(1, length, dtype=torch.long)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        recorder = StorageEvents(changed, lambda *_: None)
        recorder.ignore([*model.parameters(), tokens])
        with recorder:
            model(tokens, tokens).backward()
    return most[0] / length / config.n_embd / 4


def test_a_block_that_runs_backward_is_nearly_all_that_is_left_of_activations():
    config = LlamaConfig(vocab_size=64, seq_len=2048, n_layer=8, n_head=4, n_kv_head=4, n_embd=128)
    full, long = (_peak(config, *each, 2048) for each in (("full", "none"), ("offload", "auto")))
    assert long <= 0.40 * full
    flat = replace(config, n_layer=4)
    assert _peak(flat, "offload", "auto", 2048) == pytest.approx(long, rel=1e-3)  # the depth costs the host alone


def test_tiles_of_dropout_draw_in_backward_what_they_drew_in_forward():
    weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def function(x):
        return nn.functional.dropout((x @ weight).sin(), 0.5)

    def run(x, weight, again):
        torch.manual_seed(3)
        call = partial(tiled, function, [weight], 3, random=True)
        return checkpoint(call, x, use_reentrant=False) if again else call(x)

    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    for again in (False, True):
        assert torch.autograd.gradcheck(partial(run, again=again), (x, weight))


def test_one_recomputation_of_a_block_runs_no_tile():
    runs = []

    def function(x):
        runs.append(torch.is_grad_enabled())
        return x * x

    x = torch.ones(1, 6, 2, requires_grad=True)
    y = checkpoint(lambda x: tiled(function, [], 3, x.sin()), x, use_reentrant=False)
    y.sum().backward()
    assert runs == [False] * 3 + [True] * 3
    torch.testing.assert_close(x.grad, 2 * x.sin() * x.cos())


@pytest.mark.redundant
def test_tiles_repeat_one_matrix_product_that_recomputation_does_not(build, batch):
    # Recomputation ends before the last product of a block, whose output backward does not need.
    flops = []
    for changes in ({}, {"tiles": "1"}, {"tiles": "5"}):
        model = build(replace(DEEP, activation_checkpointing="full", **changes))
        with FlopCounterMode(display=False) as counter:
            model(*batch).backward()
        flops.append(counter.get_total_flops())
    last = 2 * batch[0].numel() * DEEP.n_embd * DEEP.ffn_width
    assert flops[1:] == [flops[0] + DEEP.n_layer * last] * 2


def test_one_tensor_as_the_gradient_of_two_parameters_is_counted_once_for_each():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    x = torch.ones(1, 6, 2)
    tiled(lambda x: x * (first + second), [first, second], 3, x).sum().backward()
    assert torch.equal(first.grad, torch.full((2,), 6.0))
    assert torch.equal(first.grad, second.grad)


def test_tiles_add_gradients_of_narrow_weights_in_fp32():
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    x = torch.ones(1, 1024, 1, dtype=torch.bfloat16)
    tiled(lambda x: x @ weight, [weight], 1024, x).sum().backward()
    assert weight.grad == 1024  # in bf16 the sum ends at 256


def test_the_number_of_tiles_is_that_of_a_token_s_numbers_however_they_are_shaped(build, batch):
    calls = []
    model = build(replace(DEEP, activation_checkpointing="full", tiles="auto"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "num_tiles", lambda *given: calls.append(given) or 1)
        model(*batch)
    assert set(calls) == {("auto", 10, DEEP.n_embd, 3 * DEEP.ffn_width)}


def test_numbers_of_tiles_and_their_borders():
    assert num_tiles("auto", 8192, 64, 512) == 16
    assert num_tiles("auto", 700, 64, 512) == 2  # of at least 256 tokens
    assert num_tiles("auto", 100, 64, 512) == 1
    assert num_tiles("7", 5, 64, 512) == 5
    assert bounds(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_tiles_are_refused_with_compile_and_without_a_known_layer():
    given = {"model": {"activation_checkpointing": "full"}, "tiles": 2}
    assert validate(TrainConfig, given).tiles == "2"
    with pytest.raises(UserError, match=r"tiles: 2 with compile; leave one out"):
        validate(TrainConfig, {**given, "compile": True})
    with pytest.raises(UserError, match=r"here: OtherMLP\); add its class's name to .*MLP_CLASSES"):
        tile_mlps(nn.ModuleList([type("OtherMLP", (nn.Linear,), {})(2, 2)]), "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MLP_CLASSES", {"OtherMLP"})
        assert tile_mlps(nn.ModuleList([type("OtherMLP", (nn.Linear,), {})(2, 2)]), "2") == ["0"]


@pytest.mark.redundant
@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # torch's compiler looks at the block's input
def test_compiled_blocks_keep_their_inputs_on_the_host_too(build, batch, backend):
    from zeroshard.train.setup.compiled import compile_model

    gc.collect()
    model = build(replace(SHALLOW, activation_checkpointing="offload"))
    compile_model(model, backend, torch.device("cpu"))
    assert_close(gradients(model, *batch), gradients(build(SHALLOW), *batch))
    assert slot_bytes() == room(INPUT_BYTES)


@pytest.mark.redundant
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
def test_a_model_that_is_compiled_around_its_blocks_keeps_their_inputs_on_the_host(build, batch):
    gc.collect()
    model = build(SHALLOW)
    offload_inputs(*model.blocks)
    found = gradients(torch.compile(model, backend="aot_eager"), *batch)
    names = {name.removeprefix("_orig_mod."): grad for name, grad in found[1].items()}
    assert_close((found[0], names), gradients(build(SHALLOW), *batch))
    assert slot_bytes() == room(INPUT_BYTES)


def test_a_parameter_that_tiles_were_not_given_is_named():
    linear, x = nn.Linear(8, 8), torch.ones(1, 6, 8, requires_grad=True)
    y = tiled(linear, [linear.weight], 2, x)
    with pytest.raises(RuntimeError, match=r"tiled: the function computes with a tensor \[8\] .* name it among params"):
        y.sum().backward()
    for num, given in ((0, x), (2, x[0])):
        with pytest.raises(ValueError, match=r"tiled: . tiles of .*; give 1 tile or more, of tensors \[B, T, ...\]"):
            tiled(linear, linear.parameters(), num, given)


def test_a_module_that_is_not_ours_is_recomputed_with_its_input_on_the_host():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()) for _ in range(3)))
    other = copy.deepcopy(blocks)
    recompute_blocks(other, "full", random=True)
    offload_inputs(*blocks)
    found = []
    for model in (blocks, other):
        torch.manual_seed(1)
        model(torch.ones(2, 4, 8)).sum().backward()
        found.append([param.grad for param in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
