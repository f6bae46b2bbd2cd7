import re

import pytest

from zeroshard.errors import UserError
from zeroshard.models import GPT2Config, LlamaConfig

GPT2_SHAPE = {"vocab_size": 256, "seq_len": 64, "n_layer": 2, "n_head": 4, "n_embd": 128}
LLAMA_SHAPE = GPT2_SHAPE | {"n_kv_head": 2}


@pytest.mark.parametrize(
    ("family", "changes", "line"),
    [
        (GPT2Config, {"n_head": 5}, "model.n_head: 5 does not divide n_embd 128; take 2 or 4, or change n_embd"),
        (GPT2Config, {"n_head": 300}, "model.n_head: 300 does not divide n_embd 128; take 64 or 128, or"),
        (LlamaConfig, {"n_kv_head": 3}, "model.n_kv_head: 3 does not divide n_head 4; take 2 or 4, or"),
        (LlamaConfig, {"n_kv_head": 8}, "model.n_kv_head: 8 does not divide n_head 4; "),
        (LlamaConfig, {"n_embd": 12}, "model.n_head: 4 leaves heads of odd width 3"),
        (LlamaConfig, {"ffn_hidden": -1}, "model.ffn_hidden: -1 is below 0; "),
        (LlamaConfig, {"rope_theta": 0.0}, "model.rope_theta: 0.0 is "),
        (LlamaConfig, {"norm_eps": float("nan")}, "model.norm_eps: nan is "),
        (LlamaConfig, {"rope_theta": float("inf")}, "model.rope_theta: inf is "),
        (GPT2Config, {"dropout": 1.0}, "model.dropout: 1.0 is outside [0, 1); "),
        (GPT2Config, {"dropout": -0.1}, "model.dropout: -0.1 is outside [0, 1); "),
        (GPT2Config, {"dropout": float("nan")}, "model.dropout: nan is outside [0, 1); "),
        (GPT2Config, {"n_layer": 2.0}, "model.n_layer: 2.0 is of the wrong type; give one int"),
        (GPT2Config, {"n_layer": True}, "model.n_layer: True is of the wrong type; give one int"),
        (GPT2Config, {"bias": 1}, "model.bias: 1 is of the wrong type; give one bool"),
        (GPT2Config, {"dropout": "0.1"}, "model.dropout: '0.1' is of the wrong type; give one float"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_one_line_that_names_the_field(family, changes, line):
    shape = GPT2_SHAPE if family is GPT2Config else LLAMA_SHAPE
    with pytest.raises(UserError, match=f"^{re.escape(line)}") as error:
        family(**shape | changes)
    assert "\n" not in str(error.value)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["vocab_size", "seq_len", "n_layer", "n_head", "n_embd"])
@pytest.mark.parametrize("value", [0, -4])
@pytest.mark.parametrize("family", [GPT2Config, LlamaConfig])
def test_counts_below_one_are_refused(family, name, value):
    shape = GPT2_SHAPE if family is GPT2Config else LLAMA_SHAPE
    with pytest.raises(UserError, match=f"^model.{name}: {value} is below 1; "):
        family(**shape | {name: value})


def test_an_integer_may_stand_for_a_float():
    assert GPT2Config(**GPT2_SHAPE, dropout=0).dropout == 0
