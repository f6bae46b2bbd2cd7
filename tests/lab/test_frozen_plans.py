"""Plans of adapters on frozen weights that are kept as codes, beside what the engine has, sends and frees."""

from dataclasses import replace

import pytest

from dry_run import compared, this_machine
from zeroshard.lab import plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.show import text
from zeroshard.lab.predict.conversions import DECODING
from zeroshard.lab.predict.hardware import find_device
from zeroshard.models.adapters import Lora
from zeroshard.settings.validate import validate
from zeroshard.zero import FrozenFormat

TINY = {"name": "llama-tiny", "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}


@pytest.mark.pairwise
@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("stage", "0123")
@pytest.mark.parametrize(
    "base", [{"format": "nf4"}, {"format": "nf4", "double": True}, {"format": "int8", "block": 64}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"prefetch": 0},
        {"prefetch": 2, "offload": {"state": "all", "fraction": "1"}},
        {"offload": {"state": "optimizer", "fraction": "1"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_a_dry_run_holds_and_sends_what_was_planned(gpus, stage, base, dtype, others, recomputed):
    given = {"gpus": gpus, "seq_len": 16, "micro_batch": 2, "stage": stage, "lora": {"rank": 2}, "base": base}
    model = {**TINY, "activation_checkpointing": recomputed}
    found = compared(validate(PlanConfig, {"model": model, "dtype": dtype, **given, **others}))
    for name in found.keys() - {"peak"}:
        assert found[name]["predicted"] == found[name]["measured"], name
    assert abs(found["peak"]["predicted"] - found["peak"]["measured"]) <= 2048, found["peak"]


def _row(**changes):
    """A step of adapters over 8B weights at stage 3 on one card of 24 GB."""
    overrides = {"activation_checkpointing": "full", **changes.pop("overrides", {})}
    given = {"gpu": "rtx-3090-24gb", "seq_len": 2048, "lora": Lora(16), "frozen_format": "nf4", **changes}
    return plan("llama-8b", stage=3, micro_batch=1, overrides=overrides, **given).rows[0]


def test_decoding_takes_its_time_twice_a_step():
    """Each block is decoded before its forward and before its backward, at 70 % of the memory's rate."""
    row, num_coded = _row(overrides={"n_layer": 4}), 4 * 218_103_808
    bytes_s = find_device("rtx-3090-24gb").device.bytes_per_s * DECODING
    assert row.timing.wire_s == pytest.approx(2 * num_coded * (0.5625 + 2) / bytes_s, rel=0.01)
    plain = _row(overrides={"n_layer": 4}, frozen_format=None)
    assert row.timing.step_s == pytest.approx(plain.timing.step_s + row.timing.wire_s, rel=1e-3)
    measured = replace(find_device("rtx-3090-24gb").device, conversions={"nf4 decode": (0.0, 1e-9)})
    assert _row(overrides={"n_layer": 4}, gpu=measured).timing.wire_s == pytest.approx(2e-9 * num_coded)


def _large(n_layer, n_embd, n_head, ffn_hidden, vocab_size, **changes):
    sizes = {"n_layer": n_layer, "n_embd": n_embd, "n_head": n_head, "ffn_hidden": ffn_hidden, "vocab_size": vocab_size}
    double = FrozenFormat("nf4", double=True)
    return _row(overrides={**sizes, "n_kv_head": 8, **changes.pop("overrides", {})}, frozen_format=double, **changes)


@pytest.mark.soak
def test_what_fits_on_cards_of_12_and_24_gb():
    """8B on one of 12 GB; 32B (Qwen2.5's sizes) on one of 24 GB; 70B (Llama 2's) on two, with inputs on the host."""
    eight = _row(gpu="rtx-3060-12gb")
    assert eight.fits
    assert not _row(gpu="rtx-3060-12gb", frozen_format=None).fits
    assert 7.5 < eight.needed_bytes / 2**30 < 9.5
    assert _large(64, 5120, 40, 27648, 152_064).fits
    given = {"world_size": 2, "overrides": {"activation_checkpointing": "offload"}}
    assert _large(80, 8192, 64, 28672, 32_000, prefetch=0, **given).fits
    assert not _large(80, 8192, 64, 28672, 32_000, **given).fits


def test_where_adapters_alone_do_not_fit_a_plan_says_what_does():
    model = {**TINY, "n_layer": 12, "n_embd": 512, "ffn_hidden": 4096}
    device = replace(this_machine(200 << 20, "cpu").device, name="small")
    given = {"seq_len": 16, "gpu": device, "overrides": {name: model[name] for name in model if name != "name"}}
    advice = plan("llama-tiny", dtype="float32", **given).advice
    assert "a base of four bits (--lora 16 --base nf4) would fit" in advice
    assert "the weights under the adapters are rounded to four bits" in advice
    found = plan("llama-tiny", lora=Lora(16), dtype="float32", frozen_format="nf4", **given)
    assert found.fits
    coded = found.as_dict()["base"]
    assert coded["num_bytes"] == pytest.approx(0.5625 * coded["num_params"], rel=1e-4)
    assert "others in nf4, 0.5625 bytes)" in text(found)
