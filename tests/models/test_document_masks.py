"""Attention inside documents: by a mask of all pairs, and by blocks as a GPU has it.

Flex attention computes on a CPU too, slowly and without a check that torch puts before its backward there.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.lab.predict.workload import preset
from zeroshard.models import GPT2, GPT2Config, Llama, LlamaConfig, attention, decoder
from zeroshard.models.document_masks import BLOCK, mask_of, positions
from zeroshard.zero import MixedPrecision

EOS = 9


def gpt2(**changes):
    return GPT2(GPT2Config(vocab_size=32, seq_len=16, n_layer=2, n_head=2, n_embd=16, **changes)).double()


def llama(**changes):
    shape = {"vocab_size": 32, "seq_len": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16}
    return Llama(LlamaConfig(**shape, **changes)).double()


TOKENS = torch.tensor([[1, 2, EOS, 3, 4, 5, EOS, EOS, 6, 7], [EOS, 1, 1, 1, 2, 3, 4, 5, 6, EOS]])
DOCUMENTS = [[[1, 2], [EOS, 3, 4, 5], [EOS], [EOS, 6, 7]], [[EOS, 1, 1, 1, 2, 3, 4, 5, 6], [EOS]]]


def test_positions_begin_anew_with_each_document():
    mask = mask_of(TOKENS == EOS)
    assert positions(TOKENS, EOS).tolist() == [[0, 1, 0, 1, 2, 3, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]]
    assert mask.shape == (2, 1, 10, 10)
    assert mask[0, 0, 4].nonzero().flatten().tolist() == [2, 3, 4]
    assert mask[1, 0, 9].nonzero().flatten().tolist() == [9]


# GPT-2's positions are looked up, the same numbers wherever a document stands. LLaMA's angles are fp32, and rounded
# otherwise at another place: 2^-24 of some ten radians.
@pytest.mark.parametrize(("make", "tolerance"), [(gpt2, 1e-12), (llama, 1e-5)])
def test_documents_of_one_sequence_are_what_they_are_alone(make, tolerance):
    model = make()
    model.eos_id = EOS
    together = model(TOKENS)
    model.eos_id = None
    for row, documents in enumerate(DOCUMENTS):
        alone = torch.cat([model(torch.tensor([document]))[0] for document in documents])
        torch.testing.assert_close(together[row], alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_gradients_are_those_of_documents_alone(make):
    model = make()
    targets = torch.arange(20).view(2, 10)
    model.eos_id = EOS
    model(TOKENS, targets).backward()
    together = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    model.eos_id = None
    for row, documents in enumerate(DOCUMENTS):
        place = 0
        for document in documents:
            wanted = targets[row, place : place + len(document)][None]
            (model(torch.tensor([document]), wanted) * len(document) / 20).backward()
            place += len(document)
    for name, param in model.named_parameters():
        torch.testing.assert_close(together[name], param.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.redundant
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputed_blocks_keep_the_mask(make, how):
    grads = []
    for choice in ("none", how):
        model = make(activation_checkpointing=choice)
        model.eos_id = EOS
        model(TOKENS, torch.ones_like(TOKENS)).backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *grads))


# -- by blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, BLOCK, 4 * BLOCK, 5 * BLOCK + 44])
def test_blocks_by_arithmetic_are_those_that_torch_finds_in_all_pairs(num_tokens):
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([0.0, 0.002, 0.02, 0.5])[:, None]  # of tokens at which a document begins
    begins_BT = torch.rand(4, num_tokens, generator=generator) < share
    blocks, mask = mask_of(begins_BT, by_blocks=True), mask_of(begins_BT)
    found = flex.create_block_mask(
        lambda b, h, q, k: mask[b, 0, q, k], 4, None, num_tokens, num_tokens, device="cpu", BLOCK_SIZE=BLOCK
    )
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    names += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    theirs = [getattr(found, name) for name in names]
    for ours, other in zip(blocks[1:], theirs, strict=True):
        assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
    for (num, indices), (other_num, other_indices) in zip(pairs(blocks[1:]), pairs(theirs), strict=True):
        assert torch.equal(num, other_num)
        is_used = torch.arange(indices.shape[-1]) < num[..., None]
        assert torch.equal(indices[is_used], other_indices[is_used])
        assert 0 <= indices.min() <= indices.max() < indices.shape[-1]


def pairs(tables):
    return zip(tables[::2], tables[1::2], strict=True)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """From now on models compute by blocks, with flex attention as the compiler has it before it makes kernels."""

    def begin():
        compiled = torch.compile(attention._flex, backend="aot_eager", fullgraph=True)
        monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(attention, "_compiled_flex", lambda: compiled)
        monkeypatch.setattr(decoder, "takes_blocks", lambda x, num_tokens, head_width, dropout: True)

    torch._dynamo.reset()
    yield begin
    torch._dynamo.reset()


@pytest.mark.redundant(but=["sizes1-False"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize(
    ("sizes", "compiles"),
    [
        (GPT2Config(32, 200, 2, 2, 32, activation_checkpointing="selective"), True),
        (GPT2Config(32, 200, 2, 2, 32, activation_checkpointing="selective:2"), False),
        (LlamaConfig(32, 200, 2, 4, 2, 64, activation_checkpointing="offload"), False),
    ],
)
def test_by_blocks_loss_and_gradients_are_those_of_the_mask(as_on_a_gpu, monkeypatch, sizes, compiles):
    model = sizes.build(kernels="reference")
    model.eos_id = EOS
    tokens_BT = torch.randint(32, (2, 200), generator=torch.Generator().manual_seed(1))

    def gradients(forward):
        model.zero_grad()
        loss = forward(tokens_BT, tokens_BT.roll(-1, 1))
        loss.backward()
        return [loss.detach(), *(param.grad for param in model.parameters())]

    wanted = gradients(model)
    as_on_a_gpu()
    for forward in [model, *([torch.compile(model, backend="aot_eager")] if compiles else [])]:
        by_blocks = gradients(forward)
        for one, other in zip(wanted, by_blocks, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(*each) for each in zip(wanted, by_blocks, strict=True))  # they are other kernels


@pytest.mark.redundant(but=["selective-None-cuda"])
@pytest.mark.parametrize(
    ("how", "dtype", "device_type"),
    [("none", torch.bfloat16, "cuda"), ("selective", None, "cuda"), ("full", torch.bfloat16, "eager")],
)
def test_documents_take_no_more_of_a_gpu_than_one_of_8192_tokens(how, dtype, device_type):
    peaks = []
    for document_mask in (False, True):
        sizes = {"seq_len": 8192, "activation_checkpointing": how, "n_layer": 4}
        model, _ = preset("gpt2-124m", sizes, seq_len=8192, kernels="auto", document_mask=document_mask, lora=None)
        trace = trace_language_model(model, 1, 8192, MixedPrecision(param_dtype=dtype), device_type=device_type)
        now = peak = 0
        for span in trace.spans:
            peak = max(peak, now + span.peak_kept + span.peak_temporary)
            now += span.kept + span.temporary
        peaks.append(peak)
    assert peaks[1] <= 1.001 * peaks[0]


def test_what_blocks_do_not_serve_has_the_mask(monkeypatch):
    monkeypatch.setattr(attention, "_has_flex", lambda device: True)

    def takes(dtype=torch.float32, length=BLOCK, width=64, dropout=0.0, *, is_cuda=True):
        x = SimpleNamespace(dtype=dtype, is_cuda=is_cuda, device=None)
        return attention.takes_blocks(x, length, width, dropout)

    assert takes()
    assert not any((takes(is_cuda=False), takes(length=40), takes(width=8), takes(dropout=0.1), takes(torch.float64)))
    torch.use_deterministic_algorithms(True)
    try:
        assert not takes()
    finally:
        torch.use_deterministic_algorithms(False)
