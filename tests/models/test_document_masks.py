import pytest
import torch

from zeroshard.models import GPT2, GPT2Config, Llama, LlamaConfig
from zeroshard.models.document_masks import positions_and_mask

EOS = 9


def gpt2(**changes):
    return GPT2(GPT2Config(vocab_size=32, seq_len=16, n_layer=2, n_head=2, n_embd=16, **changes)).double()


def llama(**changes):
    shape = {"vocab_size": 32, "seq_len": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16}
    return Llama(LlamaConfig(**shape, **changes)).double()


TOKENS = torch.tensor([[1, 2, EOS, 3, 4, 5, EOS, EOS, 6, 7], [EOS, 1, 1, 1, 2, 3, 4, 5, 6, EOS]])
DOCUMENTS = [[[1, 2], [EOS, 3, 4, 5], [EOS], [EOS, 6, 7]], [[EOS, 1, 1, 1, 2, 3, 4, 5, 6], [EOS]]]


def test_positions_begin_anew_with_each_document():
    positions, mask = positions_and_mask(TOKENS, EOS)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]]
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
