import math

import pytest
import torch

from zeroshard.host.errors import UserError
from zeroshard.models import GPT2, PRESETS, LanguageModel, Llama, build_model

PUBLISHED_NUM_PARAMS = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
}

SIZES = ("vocab_size", "seq_len", "n_layer", "n_head", "n_embd")
RECOMPUTED = "activation_checkpointing"


@pytest.mark.redundant
@pytest.mark.parametrize(("name", "num_params"), PUBLISHED_NUM_PARAMS.items())
def test_published_models_have_their_published_number_of_parameters(name, num_params):
    with torch.device("meta"):
        model = build_model(name)
    assert sum(param.numel() for param in model.parameters()) == num_params


@pytest.mark.redundant
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_on_the_meta_device_without_a_value(name):
    with torch.device("meta"):
        model = build_model(name)
    assert isinstance(model, LanguageModel)
    assert type(model) is (GPT2 if name.startswith("gpt2") else Llama)
    assert len(model.blocks) == model.config.n_layer
    assert all(param.is_meta for param in model.parameters())
    assert list(model.buffers()) == []


def test_flops_of_gpt2_124m_are_the_known_figure():
    with torch.device("meta"):
        model = build_model("gpt2-124m")
    num_multiplied = 124_439_808 - 1024 * 768  # all but the position table
    assert model.num_flops_per_token(1024) == 6 * num_multiplied + 12 * 12 * 768 * 1024 == 855_166_464


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("gpt2-124", {}, "model: there is no preset 'gpt2-124'; did you mean gpt2-124m? known: gpt2-demo, "),
        ("llama-samll", {}, "model: there is no preset 'llama-samll'; did you mean llama-small? "),
        ("zzz", {}, "model: there is no preset 'zzz'; known: gpt2-demo, "),
        ("gpt2-demo", {"n_haed": 4}, "model.n_haed: gpt2-demo has no such field; did you mean n_head? "),
        ("gpt2-demo", {"n_kv_head": 4}, "model.n_kv_head: gpt2-demo has no such field; "),
        ("gpt2-demo", {"n_head": 5}, "model.n_head: 5 does not divide n_embd 128; "),
        ("gpt2-demo", {"n_head": "4"}, "model.n_head: '4' is of the wrong type; "),
        (
            "gpt2-demo",
            {"n_head": 300},
            "model.n_head: 300 does not divide n_embd 128; take 64 or 128, or change n_embd",
        ),
        ("gpt2-demo", {"dropout": 1.0}, "model.dropout: 1.0 is outside [0, 1); "),
        ("gpt2-demo", {"dropout": -0.1}, "model.dropout: -0.1 is outside [0, 1); "),
        ("gpt2-demo", {"dropout": math.nan}, "model.dropout: nan is outside [0, 1); "),
        ("gpt2-demo", {"dropout": "0.1"}, "model.dropout: '0.1' is of the wrong type; give one float"),
        ("gpt2-demo", {"n_layer": 2.0}, "model.n_layer: 2.0 is of the wrong type; give one int"),
        ("gpt2-demo", {"n_layer": True}, "model.n_layer: True is of the wrong type; give one int"),
        ("gpt2-demo", {"bias": 1}, "model.bias: 1 is of the wrong type; give one bool"),
        *(("gpt2-demo", {size: 0}, f"model.{size}: 0 is below 1; ") for size in SIZES),
        *(("llama-tiny", {size: -4}, f"model.{size}: -4 is below 1; ") for size in SIZES),
        ("llama-tiny", {"n_kv_head": 3}, "model.n_kv_head: 3 does not divide n_head 10; take 1 or 2, or"),
        ("llama-tiny", {"n_kv_head": 20}, "model.n_kv_head: 20 does not divide n_head 10; "),
        ("llama-tiny", {"n_embd": 30}, "model.n_head: 10 leaves heads of odd width 3"),
        ("llama-tiny", {"ffn_hidden": -1}, "model.ffn_hidden: -1 is below 0; "),
        ("llama-tiny", {"rope_theta": 0.0}, "model.rope_theta: 0.0 is not positive and finite; "),
        ("llama-tiny", {"rope_theta": math.inf}, "model.rope_theta: inf is not positive and finite; "),
        ("llama-tiny", {"norm_eps": math.nan}, "model.norm_eps: nan is not positive and finite; "),
        *(
            (
                "gpt2-demo",
                {RECOMPUTED: how},
                f"model.{RECOMPUTED}: {how!r} is not a choice; choose none, full, offload,",
            )
            for how in ("all", "every", "every:0", "every:-1", "every:x", "")
        ),
        ("gpt2-demo", {RECOMPUTED: True}, f"model.{RECOMPUTED}: True is of the wrong type; "),
        ("llama-tiny", {"tiles": "2"}, f"tiles: 2 with {RECOMPUTED} 'none', which keeps what tiles would not; "),
        ("llama-tiny", {"tiles": "2", RECOMPUTED: "selective"}, f"tiles: 2 with {RECOMPUTED} 'selective', which"),
        ("llama-tiny", {"tiles": "0", RECOMPUTED: "full"}, "tiles: '0' is not a choice; choose none, auto"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line_that_names_the_nearest(name, overrides, line):
    with pytest.raises(UserError) as error:
        build_model(name, overrides=overrides)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_an_integer_may_stand_for_a_float():
    assert build_model("gpt2-demo", overrides={"dropout": 0}).config.dropout == 0
