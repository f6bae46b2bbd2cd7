"""The mapping to Hugging Face's models, without them; tests/integrations holds it against the real ones."""

import json
from dataclasses import replace

import pytest

from zeroshard.host.errors import UserError
from zeroshard.models import GPT2Config, LlamaConfig
from zeroshard.models.hugging_face.gpt2_llama_conversion import find_weights, from_hf_config, hf_config, hf_weights

GPT2_SHAPE = GPT2Config(vocab_size=50, seq_len=16, n_layer=2, n_head=2, n_embd=8)
LLAMA_SHAPE = LlamaConfig(vocab_size=50, seq_len=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, ffn_hidden=24)
CONFIGS = [
    GPT2_SHAPE,
    replace(GPT2_SHAPE, dropout=0.1),
    LLAMA_SHAPE,
    replace(LLAMA_SHAPE, tie_embeddings=True, rope_theta=5e5, norm_eps=1e-6, n_kv_head=4),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_survives_the_way_there_and_back(config):
    raw = json.loads(json.dumps(hf_config(config, dtype="float32", eos_id=7)))
    assert from_hf_config(raw) == config
    assert raw["eos_token_id"] == 7


def test_a_feed_forward_width_by_rule_comes_back_as_a_number():
    config = replace(LLAMA_SHAPE, ffn_hidden=0)
    assert from_hf_config(hf_config(config, dtype="float32")) == replace(config, ffn_hidden=config.ffn_width)


@pytest.mark.redundant
@pytest.mark.parametrize("config", CONFIGS)
def test_published_files_without_the_prefix_and_with_old_buffers_are_found(config):
    shapes = {w.hf_name.removeprefix("transformer.").removeprefix("model."): w.hf_shape for w in hf_weights(config)}
    old = {"h.0.attn.bias": (1, 1, 16, 16), "h.0.attn.masked_bias": (), "layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    found = find_weights(config, {**shapes, **old})
    assert found.keys() == shapes.keys()
    assert {weight.name for weight in found.values()} == {weight.name for weight in hf_weights(config)}


def test_a_tied_head_in_the_file_is_told_apart():
    shapes = {weight.hf_name: weight.hf_shape for weight in hf_weights(GPT2_SHAPE)}
    found = find_weights(GPT2_SHAPE, {**shapes, "lm_head.weight": (50, 8)})
    assert found["lm_head.weight"].name == "wte.weight"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"transformer.wpe.weight": None}, "transformer.wpe.weight: is not among the weights"),
        ({"transformer.wpe.weight": (8, 16)}, r"transformer.wpe.weight: has shape \[8, 16\] where .* says \[16, 8\]"),
        ({"lm_head.weight": (3, 8)}, r"lm_head.weight: has shape \[3, 8\]"),
        ({"transformer.adapter": (3, 8)}, "transformer.adapter: is among the weights, and the model has no place"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(changes, line):
    shapes = {weight.hf_name: weight.hf_shape for weight in hf_weights(GPT2_SHAPE)} | changes
    with pytest.raises(UserError, match=line):
        find_weights(GPT2_SHAPE, {name: shape for name, shape in shapes.items() if shape is not None})


@pytest.mark.parametrize(
    ("config", "changes", "line"),
    [
        (GPT2_SHAPE, {"model_type": "mamba"}, "model_type: 'mamba' cannot be imported"),
        (GPT2_SHAPE, {"activation_function": "relu"}, "activation_function: 'relu' is not computed here, but"),
        (GPT2_SHAPE, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon: 1e-06"),
        (GPT2_SHAPE, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        (GPT2_SHAPE, {"n_inner": 24}, "n_inner: 24 is not computed here, but 32 is"),
        (GPT2_SHAPE, {"tie_word_embeddings": False}, "tie_word_embeddings: False"),
        (GPT2_SHAPE, {"attn_pdrop": 0.3}, "embd_pdrop .*0.3.* are not one rate"),
        (GPT2_SHAPE, {"n_head": 3}, "model.n_head: 3 does not divide"),
        (GPT2_SHAPE, {"n_layer": "two"}, "model.n_layer: 'two' is of the wrong type"),
        (LLAMA_SHAPE, {"attention_bias": True}, "attention_bias: True"),
        (LLAMA_SHAPE, {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        (LLAMA_SHAPE, {"rope_parameters": {"rope_theta": "far"}}, "model.rope_theta: 'far' is of the wrong type"),
        (LLAMA_SHAPE, {"rope_parameters": "yarn"}, "rope_parameters: 'yarn'"),
        (LLAMA_SHAPE, {"head_dim": 8}, "head_dim: 8 is not computed here, but 4 is"),
        (LLAMA_SHAPE, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_parameters: 'llama3'"),
        (LLAMA_SHAPE, {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling: 'linear'"),
    ],
)
def test_what_our_models_do_not_compute_is_refused_by_its_key(config, changes, line):
    with pytest.raises(UserError, match=line):
        from_hf_config({**hf_config(config, dtype="float32"), **changes})
