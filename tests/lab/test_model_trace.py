import gc
import weakref
from contextlib import nullcontext
from importlib import import_module
from itertools import product, takewhile

import pytest
import torch
from torch import nn

from hf_models import ARCHITECTURES, GROUPED, require_transformers
from zeroshard.host.errors import UserError
from zeroshard.lab.predict import model_trace
from zeroshard.lab.predict.model_spans import repeat_blocks
from zeroshard.lab.predict.model_trace import tokens_and_targets, trace_language_model, trace_model
from zeroshard.lab.predict.on_meta import on_meta
from zeroshard.models import build_model
from zeroshard.models.adapters import Lora
from zeroshard.models.hugging_face.model import TRACE_ON_META
from zeroshard.models.llama import MLP
from zeroshard.models.lora import TARGETS
from zeroshard.zero import MixedPrecision

FP32, BF16 = MixedPrecision(), MixedPrecision(param_dtype=torch.bfloat16)
SEQ_LEN = 32


def _model(name="llama-tiny", lora=None, *, for_plan=False, **overrides):
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 32, **({"n_kv_head": 2} if name.startswith("llama") else {})}
    with torch.device("meta"):
        given = {"overrides": {**sizes, **overrides}, "lora": lora, "for_plan": for_plan}
        return build_model(name, vocab_size=97, seq_len=SEQ_LEN, **given)


def _whole(model, micro_batch, precision, device_type="cpu", seq_len=SEQ_LEN, **how):
    inputs = tokens_and_targets(seq_len)
    return trace_model(model, micro_batch, model.units, inputs, precision, device_type=device_type, **how)


FP16 = MixedPrecision(param_dtype=torch.float16)
ON_META = [  # in `make test`; of the others some are traced with fake tensors in any case
    ("gpt2-demo", "none", "auto", "cpu", FP32),
    ("gpt2-demo", "full", "auto", "cuda", BF16),
    ("gpt2-demo", "selective:2", "reference", "cuda", FP32),
    ("gpt2-demo", "offload by 3 tiles", "auto", "cuda", FP16),
    ("llama-tiny", "none", "reference", "cuda", BF16),
    ("llama-tiny", "full", "reference", "cpu", FP16),
    ("llama-tiny", "selective:2", "auto", "cpu", BF16),
    ("llama-tiny", "offload by 3 tiles", "auto", "cpu", FP32),
]
OF_TRANSFORMERS = [("qwen2", "full by 3 tiles"), ("mistral", "none")]  # the second has a mask: fake tensors after all
_AXES = (
    ("gpt2-demo", "llama-tiny"),
    ("none", "full", "selective:2", "offload by 3 tiles"),
    ("auto", "reference"),
    ("cpu", "cuda"),
    (FP32, BF16, FP16),
)


@pytest.mark.redundant(but=["llama-tiny-full-reference-cpu-precision68"])
@pytest.mark.parametrize(
    ("name", "recomputed", "kernels", "device_type", "precision"),
    [pytest.param(*each, marks=[] if each in ON_META else [pytest.mark.soak]) for each in product(*_AXES)],
)
def test_the_trace_on_the_meta_device_is_the_one_of_fake_tensors(name, recomputed, kernels, device_type, precision):
    recomputed, _, tiles = recomputed.removesuffix(" tiles").partition(" by ")
    overrides = {"n_layer": 2, "activation_checkpointing": recomputed, "tiles": tiles or "none"}
    with torch.device("meta"):
        model = build_model(name, vocab_size=97, seq_len=SEQ_LEN, overrides=overrides, kernels=kernels)
    assert trace_language_model(model, 2, SEQ_LEN, precision, device_type=device_type) == _whole(
        model, 2, precision, device_type
    )


@pytest.mark.parametrize(
    ("kind", "recomputed"),
    [
        pytest.param(kind, recomputed, marks=[] if (kind, recomputed) in OF_TRANSFORMERS else [pytest.mark.soak])
        for kind in sorted(TRACE_ON_META)
        for recomputed in ("none", "full", "offload", "full by 3 tiles")
    ],
)
def test_models_of_transformers_trace_on_the_meta_device_as_with_fake_tensors(kind, recomputed, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(model_trace, "on_meta", lambda: asked.append(kind) or on_meta())
    recomputed, _, tiles = recomputed.removesuffix(" tiles").partition(" by ")
    config = require_transformers().AutoConfig.for_model(kind, **ARCHITECTURES.get(kind, GROUPED))
    config.save_pretrained(tmp_path)
    overrides = {"activation_checkpointing": recomputed, "tiles": tiles or "none"}
    with torch.device("meta"):
        model = build_model(f"hf:{tmp_path}", overrides=overrides, for_plan=True)
    assert trace_language_model(model, 2, SEQ_LEN, BF16, device_type="cuda") == _whole(model, 2, BF16, "cuda")
    assert asked == [kind]


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("name", "recomputed", "device_type", "num_layers"),
    [
        pytest.param("gpt2-demo", "none", "cpu", 5, marks=pytest.mark.soak),
        ("gpt2-demo", "selective", "cuda", 5),
        pytest.param("llama-tiny", "selective:2", "cuda", 5, marks=pytest.mark.soak),
        pytest.param("llama-tiny", "none", "cuda", 5, marks=pytest.mark.soak),
        ("llama-tiny", "full", "cpu", 5),
        ("llama-tiny", "every:2", "cpu", 8),
        ("llama-tiny", "offload", "cpu", 7),
        ("llama-tiny", "offload", "cuda", 9),
    ],
)
def test_a_few_blocks_tell_all_of_a_deep_model(name, recomputed, device_type, num_layers):
    model = _model(name, activation_checkpointing=recomputed, n_layer=num_layers)
    few = trace_language_model(model, 2, SEQ_LEN, BF16, device_type=device_type)
    assert few == _whole(model, 2, BF16, device_type)


@pytest.mark.redundant
@pytest.mark.parametrize("device_type", [pytest.param("cpu", marks=pytest.mark.soak), "cuda"])
def test_a_few_tiles_tell_all_of_many(device_type, monkeypatch):
    model = _model("llama-tiny", n_layer=2, activation_checkpointing="offload", tiles="7")  # 4 of 3 tokens, 3 of 2
    runs = []
    monkeypatch.setattr(MLP, "forward", lambda self, x, run=MLP.forward: runs.append(x.shape[1]) or run(self, x))
    few = _whole(model, 2, BF16, device_type, seq_len=18)
    assert runs == [3, 3, 3, 2, 2, 2] * 4
    monkeypatch.setattr(model_trace, "alike_tiles", lambda log: nullcontext())
    assert few == _whole(model, 2, BF16, device_type, seq_len=18)
    assert len(runs) == 4 * (6 + 7)


@pytest.mark.redundant
def test_a_few_blocks_tell_all_of_a_deep_model_whose_embedding_is_frozen():
    model = _model("llama-tiny", n_layer=5, lora=Lora(4))
    assert len(model.units) > len(model.blocks)  # embedding and head are units; no gradient reaches the embedding
    assert trace_language_model(model, 2, SEQ_LEN, BF16, device_type="cuda") == _whole(model, 2, BF16, "cuda")


@pytest.mark.redundant(but=["llama-tiny-lora0"])
@pytest.mark.parametrize(
    ("name", "lora"), [("llama-tiny", Lora(4)), ("gpt2-demo", Lora(4, dropout=0.1, targets=("all-linear",)))]
)
def test_adapters_of_a_plan_have_the_names_and_operations_of_peft_s(name, lora):
    pytest.importorskip("peft")
    ours, theirs = (_model(name, lora, n_layer=2, for_plan=planned) for planned in (True, False))
    assert theirs.lora_config is not None is ours.lora_config
    described = [[(n, p.shape, p.requires_grad) for n, p in model.named_parameters()] for model in (ours, theirs)]
    assert described[0] == described[1]
    assert ours.num_flops_per_token(SEQ_LEN) == theirs.num_flops_per_token(SEQ_LEN)
    assert _whole(ours, 2, BF16, "cuda") == _whole(theirs, 2, BF16, "cuda")
    known = import_module("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {kind: known[kind] for kind in TARGETS} == TARGETS


@pytest.mark.redundant
@pytest.mark.parametrize("target", ["lm_head", "blocks.6.self_attn.q_proj"])
def test_adapters_may_be_in_some_blocks_alone_or_in_none(target):
    model = _model("llama-tiny", n_layer=8, lora=Lora(4, targets=(target,)))
    assert trace_language_model(model, 2, SEQ_LEN, BF16, device_type="cuda") == _whole(model, 2, BF16, "cuda")


@pytest.mark.redundant(but=["none"])
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_a_gpu_s_attention_keeps_no_scores_where_it_drops_some(recomputed):
    given = {"n_layer": 2, "activation_checkpointing": recomputed}
    traces = [
        trace_language_model(_model("gpt2-demo", dropout=rate, **given), 2, SEQ_LEN, BF16, device_type="cuda")
        for rate in (0.0, 0.1)
    ]
    attention = [[w for span in t.spans for w in span.work if w.attention] for t in traces]
    assert attention[0] == attention[1] != []
    scores = 2 * 4 * SEQ_LEN * SEQ_LEN * 2  # bytes of one block's, were they kept
    kept = [sum(span.kept for span in takewhile(lambda s: s.event.name != "pre_backward", t.spans)) for t in traces]
    assert kept[1] - kept[0] < 2 * scores


def test_blocks_that_differ_are_not_repeated():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) if i != 2 else nn.Sequential(nn.Linear(4, 4)) for i in range(4))

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = block(x).tanh() if i == 2 else block(x)
            return x.square().mean()

    trace = trace_model(Odd(), 3, None, lambda rows: (torch.zeros(rows, 4),), FP32)
    assert trace.units == tuple(f"blocks.{i}" for i in range(4))
    assert repeat_blocks(trace, 6) is None


@pytest.mark.redundant
@pytest.mark.parametrize("name", ["gpt2-demo", "llama-tiny"])
def test_flops_are_those_of_the_formula_but_for_the_mask(name):
    """The formula credits attention in full, 12 L d T a token; under the mask half of it is computed, 7 of 12 units
    with flash attention's second look at the weights; it counts biases and norms as if they were multiplied by."""
    model = _model(name)
    computed = sum(work.flops for span in _whole(model, 2, FP32).spans for work in span.work) / (2 * SEQ_LEN)
    attention = 12 * 3 * 32 * SEQ_LEN
    assert computed == pytest.approx(model.num_flops_per_token(SEQ_LEN) - attention + attention * 7 / 12, rel=0.05)


@pytest.mark.redundant
def test_nothing_of_the_model_is_alive_after_its_trace():
    alive = weakref.WeakSet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_trace._Log, "__init__", _noting(alive))
        _whole(_model(activation_checkpointing="full"), 2, FP32)
    gc.collect()
    assert not alive


def _noting(alive):
    init = model_trace._Log.__init__

    def noted(self, specs, *args, **kwargs):
        alive.update(spec.module for spec in specs)
        init(self, specs, *args, **kwargs)

    return noted


@pytest.mark.redundant
def test_the_model_stays_as_it_was():
    model = build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides={"n_layer": 2, "n_head": 3, "n_embd": 9})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace_model(model, 1, model.units, tokens_and_targets(8), BF16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None and not param._backward_hooks for param in model.parameters())


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda layer, x: layer(x) if x.sum() > 0 else layer(-x), "^model: its forward reads values of tensors"),
        (lambda layer, x: layer(x).detach(), "^model: no output of it takes gradients"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_in_a_line(forward, said):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return forward(self.layer, x)

    with pytest.raises(UserError, match=said):
        trace_model(Net(), 3, [], lambda rows: (torch.zeros(rows, 4),), FP32)
