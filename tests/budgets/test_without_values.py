"""A step on tensors without values is the step of tensors with values: every byte, every message."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from zeroshard.lab.predict.dry_run import dry_run
from zeroshard.lab.predict.model_trace import tokens_and_targets
from zeroshard.models import build_model
from zeroshard.models.adapters import Lora
from zeroshard.zero import STAGES, MixedPrecision
from zeroshard.zero import precision as precision_module

SEQ_LEN, BF16 = 32, torch.bfloat16
NARROW = MixedPrecision(param_dtype=BF16)
NO_CHANGES = MappingProxyType({})


def _measured(device, name, stage, precision=NARROW, changes=NO_CHANGES, lora=None, **settings):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16} | ({"n_kv_head": 1} if name == "llama-tiny" else {})
    with torch.device(device):
        model = build_model(name, vocab_size=61, seq_len=SEQ_LEN, overrides={**shape, **changes}, lora=lora)
    given = {"world_size": 8, "rank": 5, "num_micro": 2, "num_steps": 2, **settings}
    return dry_run(
        model,
        tokens_and_targets(SEQ_LEN),
        strategy=STAGES[stage],
        micro_batch=2,
        units=list(model.blocks),
        precision=precision,
        device=device,
        **given,
    )


def _assert_equal(*asked, **settings):
    real, none = (_measured(device, *asked, **settings) for device in ("cpu", "meta"))
    for name in ("start", "before_update", "after_update", "peak_bytes", "peak_by_category"):
        assert getattr(real, name) == getattr(none, name), name
    sent = [[(m.op, m.num_bytes, m.scope, m.world_size) for m in each.messages] for each in (real, none)]
    assert sent[0] == sent[1]
    assert none.step_s == []


RECOMPUTED = {"activation_checkpointing": "selective", "dropout": 0.1}


@pytest.mark.parametrize(
    ("name", "stage", "settings"),
    [
        ("llama-tiny", 0, {}),
        ("gpt2-demo", 1, {"changes": RECOMPUTED}),
        ("llama-tiny", 2, {"precision": MixedPrecision(gather="int8", reduce="int8", block=16)}),
        ("llama-tiny", 3, {"shard_size": 2, "prefetch": 3}),
    ],
)
def test_what_a_rank_holds_and_sends_needs_no_values(name, stage, settings, monkeypatch):
    monkeypatch.setattr(precision_module, "EXACT_NUMEL", 64)  # or all of so small a model would travel as it is
    _assert_equal(name, stage, **settings)


@pytest.mark.soak
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["gpt2-demo", "llama-tiny"])
@pytest.mark.parametrize(
    "settings",
    [
        *({"changes": {"activation_checkpointing": how}} for how in ("none", "full", "selective:2", "every:2")),
        *({"precision": precision} for precision in (MixedPrecision(), MixedPrecision(BF16, BF16))),
        *({"precision": MixedPrecision(param_dtype=torch.float16)}, {"lora": Lora(3)}, {"accumulate": "sharded"}),
        *({"world_size": world_size, "rank": 0, "num_micro": 1} for world_size in (1, 100)),
    ],
)
def test_no_setting_of_a_step_needs_values(name, stage, settings):
    _assert_equal(name, stage, **settings)


def test_what_may_differ_without_values_is_refused():
    with torch.device("meta"):
        masked = build_model("llama-tiny", overrides={"n_layer": 1})
    masked.eos_id = 0
    asked = {"world_size": 2, "strategy": STAGES[2], "micro_batch": 1, "device": "meta"}
    for model in (masked, torch.nn.Linear(2, 2, device="meta")):
        with pytest.raises(ValueError, match=r"device: a .* is not known to step on meta as on the CPU"):
            dry_run(model, tokens_and_targets(8), **asked)
    masked.eos_id = None
    with pytest.raises(ValueError, match="optimizer: on the meta device fused AdamW is known alone"):
        dry_run(masked, tokens_and_targets(8), optimizer=lambda zero: [zero.optimizer(torch.optim.SGD)], **asked)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_one_step_is_too_few(num_steps):
    with pytest.raises(ValueError, match=f"^num_steps: {num_steps} steps; give at least 2"):
        _measured("meta", "gpt2-demo", 1, num_steps=num_steps)
