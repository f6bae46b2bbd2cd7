"""The head computes the loss inside of its own forward, so that it may be a unit; and which models have such units."""

import pytest
import torch

from hf_models import hf_folder  # noqa: F401
from zeroshard.comm import ObservedCommunicator, run_threads
from zeroshard.models import build_model
from zeroshard.models.adapters import Lora
from zeroshard.models.base import next_token_loss
from zeroshard.zero import Zero

SIZES = {"n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 16}
TOKENS = torch.arange(24).view(2, 12) % 61


def _llama(**built):
    overrides = {**SIZES, **built.pop("overrides", {})}
    return build_model("llama-tiny", vocab_size=61, seq_len=12, overrides=overrides, **built)


def _names(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in model.units]


def test_a_matrix_that_embedding_and_head_share_stays_in_the_root():
    assert _names(_llama()) == ["embed_tokens", "blocks.0", "blocks.1", "lm_head"]
    assert _names(_llama(overrides={"tie_embeddings": True})) == ["blocks.0", "blocks.1"]
    assert _names(build_model("gpt2-demo", overrides={"n_layer": 2})) == ["blocks.0", "blocks.1"]


@pytest.mark.redundant
@pytest.mark.parametrize(("kind", "ends"), [("qwen3", True), ("gpt_neox", True), ("qwen2", False), ("mixtral", True)])
def test_a_model_of_transformers_is_cut_alike(kind, ends, hf_folder):  # noqa: F811
    model = build_model(f"hf:{hf_folder(kind)}")
    embedding, head = model.hf.get_input_embeddings(), model.hf.get_output_embeddings()
    assert model.units == ([embedding, *model.blocks, head] if ends else list(model.blocks))
    called = []
    for module in (embedding, head):
        module.register_forward_pre_hook(lambda module, args: called.append(module))
    model(TOKENS, TOKENS).backward()
    assert called == [embedding, head]


def test_the_loss_of_a_head_that_adapters_have_wrapped_is_theirs_too():
    pytest.importorskip("peft")
    model = _llama(lora=Lora(2, targets=("lm_head",)))
    with torch.no_grad():
        model.lm_head.lora_B["default"].weight.normal_()
    loss = model(TOKENS, TOKENS)
    torch.testing.assert_close(loss, next_token_loss(model(TOKENS), TOKENS))
    loss.backward()
    assert model.lm_head.lora_A["default"].weight.grad.any()


def test_an_embedding_is_not_gathered_for_a_backward_that_reads_none_of_it():
    models = [_llama() for _ in range(2)]

    def gathers(observed):
        return [record.label for record in observed.records if record.label.endswith("/weights")]

    def on_rank(comm):
        model, observed = models[comm.rank], ObservedCommunicator(comm)
        zero = Zero(model, 3, units=model.units, comm=observed)
        model(TOKENS, TOKENS).backward()
        gathered = gathers(observed)
        names = ["root", "embed_tokens", "blocks.0", "blocks.1", "lm_head", "blocks.1", "blocks.0"]
        assert gathered == [f"{name}/weights" for name in names]
        zero.remove()
        model.embed_tokens.register_forward_hook(lambda module, args, output: output * module.weight.sum())
        observed.drain()
        Zero(model, 3, units=model.units, comm=observed)
        model(TOKENS, TOKENS).backward()
        assert gathers(observed) == [*gathered, "embed_tokens/weights"]
        assert model.embed_tokens.weight.grad.full_tensor().isfinite().all()

    run_threads(on_rank, 2)
