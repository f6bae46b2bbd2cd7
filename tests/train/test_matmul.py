"""`--matmul fp8`: the blocks' linear layers multiply in 8 bits, here as torchao emulates it on a CPU."""

import sys

import pytest
import torch

from tiny_runs import built, events_of, trained
from zeroshard import checkpoint
from zeroshard.cli import main
from zeroshard.host.errors import UserError
from zeroshard.lab import plan
from zeroshard.models import build_model
from zeroshard.train.setup.products_in_8_bits import check_products, multiply_in_8_bits

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def fp8_config(text_config, tmp_path):
    """`fp8_config(**changes)`: a run with products in 8 bits, in the folder ``out``."""
    pytest.importorskip("torchao.float8", reason="torchao is not installed")

    def make(out="run", **changes):
        return text_config(**{"matmul": "fp8", "out": str(tmp_path / out), **changes})

    return make


def test_stages_agree_to_the_bit_and_come_near_the_products_in_the_dtype(fp8_config):
    plain = trained(fp8_config("plain", matmul="dtype"), 2)
    first, *others = [trained(fp8_config(f"zero{stage}", strategy=f"zero{stage}"), 2) for stage in (0, 1, 3)]
    assert all(other == first for other in others)
    assert first != plain
    assert first["val"][0] == pytest.approx(plain["val"][0], rel=0.01)


@pytest.mark.redundant
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo hides it elsewhere
def test_a_compiled_recomputed_model_trains(fp8_config):
    changes = {"compile": "on", "compile_backend": "aot_eager", "model": {"activation_checkpointing": "selective"}}
    sizes = {"name": "llama-tiny", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_kv_head": 1}
    eager = trained(fp8_config("eager", model=sizes))
    compiled = trained(fp8_config("compiled", **{**changes, "model": sizes | changes["model"]}))
    assert compiled["val"] == pytest.approx(eager["val"], rel=1e-5)


def test_a_run_is_resumed_exported_and_evaluated_without_it(fp8_config, tmp_path, capsys, monkeypatch):
    config = fp8_config()
    trained(config)
    plain = trained(fp8_config("plain", matmul="dtype")) and tmp_path / "plain/checkpoints"
    in_8_bits, names = (
        {(each.name, each.kind, each.dtype) for each in checkpoint.read_manifest(next(folder.iterdir())).tensors}
        for folder in (tmp_path / "run/checkpoints", plain)
    )
    assert in_8_bits == names
    assert events_of(config.out, "start")[0]["about"]["matmul"].startswith(
        "fp8 in 8 linear layers of the blocks, emulat"
    )
    capsys.readouterr()
    trained(fp8_config(matmul="dtype", resume="auto", max_steps=8))
    assert "matmul was fp8, now it is dtype" in capsys.readouterr().err
    trained(fp8_config(resume="auto", max_steps=9))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert main(["eval", config.out, "--strategy", "zero1"]) == 0
    assert main(["export", config.out, str(tmp_path / "hf")]) == 0


def test_routers_and_layers_of_odd_sizes_stay_as_they_are():
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    model = build_model(
        "llama-tiny",
        overrides={"n_layer": 1, "n_embd": 32, "n_head": 2, "n_kv_head": 1, "ffn_hidden": 40},
        vocab_size=64,
    )
    before = dict(model.named_parameters())
    multiply_in_8_bits(model, CPU)
    kinds = {name.rpartition(".")[2]: type(each).__name__ for name, each in model.blocks.named_modules()}
    in_8_bits = {name for name, kind in kinds.items() if kind == "Float8Linear"}
    assert in_8_bits == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert type(model.lm_head).__name__ == "Head"
    assert all(param is before[name] for name, param in model.named_parameters())
    model.blocks[0].gate = torch.nn.Linear(32, 64)
    assert model.blocks[0].gate not in model.layers_in_8_bits


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": {"rank": 2}}, r"matmul: fp8 with lora\.rank: .*; leave one out"),
        ({"tiles": "2", "model": {"activation_checkpointing": "full"}}, r"matmul: fp8 with tiles: .*; leave one out"),
        ({"seq_len": 15}, r"matmul: fp8 with 30 tokens in a rank's micro-batch, .*; change micro_batch_size or"),
    ],
)
def test_what_does_not_go_with_it_is_refused(text_config, changes, said):
    with pytest.raises(ValueError, match=said):
        text_config(matmul="fp8", **changes)


@pytest.mark.parametrize(
    ("capability", "dtype", "missing", "said"),
    [
        ((8, 0), "bfloat16", False, r"a card has no products in 8 bits: they begin with sm_89; leave it out"),
        ((9, 0), "float32", False, r"fp8 multiplies for bfloat16 alone, and dtype is float32; change one"),
        ((9, 0), "bfloat16", True, r"fp8 needs torchao; pip install 'zeroshard\[fp8\]', or leave it out"),
    ],
)
def test_what_a_machine_lacks_is_said(text_config, monkeypatch, capability, dtype, missing, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    if missing:
        monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=f"^matmul: {said}"):
        check_products(text_config(matmul="fp8", dtype=dtype), GPU)


def test_a_model_without_such_layers_is_refused(fp8_config):
    with pytest.raises(UserError, match=r"matmul: no linear layer in a block of a GPT2 has two sizes"):
        built(fp8_config(model={"name": "gpt2-demo", "n_layer": 1, "n_embd": 24, "n_head": 2}))


def test_plans_have_the_rate_and_the_rounded_factors():
    job = {"gpu": "h100-80gb", "overrides": {"n_layer": 4}, "seq_len": 2048}
    found = {matmul: plan("llama-7b", matmul=matmul, **job) for matmul in ("dtype", "fp8")}
    one, other = (next(row for row in found[each].rows if row.micro_batch == 1) for each in ("dtype", "fp8"))
    assert other.timing.step_s < one.timing.step_s
    assert (
        0.5 < other.timing.bound_s["flops"] / one.timing.bound_s["flops"] < 0.7
    )  # attention and head stay as they are
    rounded = (2048 + 11008) * 4096 + 4 * (2048 + 4096)
    assert 0 <= other.needed_bytes - one.needed_bytes <= 1.1 * rounded
    for gpu, said in (("a100-80gb", "no rate of products in 8 bits of a100-80gb is known"),):
        with pytest.raises(UserError, match=f"matmul: {said}"):
            plan("llama-7b", matmul="fp8", **{**job, "gpu": gpu})
    with pytest.raises(UserError, match="matmul: fp8 multiplies for bfloat16"):
        plan("llama-7b", matmul="fp8", dtype="float32", **job)
