"""Adapters of `peft` on sharded models: trained as in one process, resumed elsewhere, opened by others."""

import json
import re
from importlib.util import find_spec

import pytest
import torch

from hf_models import (
    SEQ_LEN,
    VOCAB_SIZE,
    batches,
    hf_folder,  # noqa: F401 -- a fixture
    make_model,
    require_transformers,
    text_model,  # noqa: F401 -- a fixture
    trained,
    trained_alone,
)
from tiny_runs import built, train_on
from zeroshard import checkpoint
from zeroshard.cli import main
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.integrations.hf_export import run_export
from zeroshard.lab.planner.run_plan import predict
from zeroshard.models import build_model
from zeroshard.models.adapters import Lora, base_name, is_adapter
from zeroshard.train.config.command_settings import EvalConfig, ExportConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.inference.evaluation import local_score
from zeroshard.train.inference.generate import load_for_text
from zeroshard.train.loop.loop import train
from zeroshard.train.setup.build import build_run
from zeroshard.train.setup.hugging_face import with_model_files
from zeroshard.train.start import run_training

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
CPU, WORLD_SIZE, RANK, NUM_STEPS, MAX_NORM = torch.device("cpu"), 2, 4, 4, 1.0
OURS = {
    "gpt2-demo": {"n_layer": 2, "n_embd": 16, "n_head": 2, "seq_len": 16},
    "llama-tiny": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_kv_head": 1, "seq_len": 16},
}


TOKENS = next(batches(1))[0]


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """A folder of a model with as many ids as there are bytes, and more."""
    folder = tmp_path_factory.mktemp("bytes")
    make_model("llama", vocab_size=300).save_pretrained(folder)
    return folder


def config_of(model, strategy="zero3", **changes):
    settings = {"data": {"source": "synthetic"}, "lr": 1e-2, "fused": False, "device": "cpu", "dtype": "float32"}
    lora = {"rank": RANK, **changes.pop("lora", {})}
    found = {"model": model, "lora": lora, "strategy": strategy, "seq_len": SEQ_LEN, "out": "x", **settings, **changes}
    return with_model_files(TrainConfig.model_validate(found))


def trained_by_peft(folder):
    """Losses and norms of one process with `transformers`, `peft` and torch alone."""
    import peft

    model = require_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM")).train()
    ours = build_model(f"hf:{folder}", lora=Lora(RANK)).lora_root.state_dict()
    missing, unexpected = model.base_model.model.load_state_dict(ours, strict=False)
    assert not missing
    assert not unexpected
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    return trained_alone(model, optimizer, NUM_STEPS, MAX_NORM)


def test_every_stage_trains_adapters_to_the_same_bits_and_as_peft_does_in_one_process(hf_folder):  # noqa: F811
    folder = hf_folder("llama")
    expected = trained_by_peft(folder)
    before = build_model(f"hf:{folder}").state_dict()
    by_stage = []
    for stage in range(4):
        config = config_of(f"hf:{folder}", f"zero{stage}")

        def rank_main(comm, config=config):
            found, _, strategy = trained(comm, config, NUM_STEPS, MAX_NORM)
            return found, strategy.state_dict(), strategy.memory_bytes()

        (found, state, held), _ = run_threads(rank_main, WORLD_SIZE)
        by_stage.append((found, state))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        moved = {name for name, value in state.items() if is_adapter(name) and "lora_B" in name and value.any()}
        assert len(moved) == 4  # q_proj and v_proj of two blocks
        assert all(torch.equal(value, before[base_name(n)]) for n, value in state.items() if not is_adapter(n))
        assert held["optimizer"] < 0.2 * held["params"]
    for found, state in by_stage[1:]:
        assert found == by_stage[0][0]
        assert all(torch.equal(value, by_stage[0][1][name]) for name, value in state.items())


@pytest.mark.parametrize("recomputed", ["full", pytest.param("selective", marks=pytest.mark.soak)])
def test_dropout_of_adapters_is_drawn_again_where_blocks_run_again(hf_folder, recomputed):  # noqa: F811
    found = []
    for how in ("none", recomputed):
        model = {"name": f"hf:{hf_folder('llama')}", "activation_checkpointing": how}
        torch.manual_seed(3)
        found.append(trained(LocalCommunicator(), config_of(model, lora={"dropout": 0.5}), 3, MAX_NORM)[0])
    assert found[0] == found[1]


def save_gpt2(folder):
    transformers = require_transformers()
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.redundant(but=["gpt2-targets1"])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", ()),
        ("gpt2", ("c_attn", "c_fc")),
        pytest.param("mixtral", (), marks=pytest.mark.soak),
        pytest.param("phi3", ("all-linear",), marks=pytest.mark.soak),
    ],
)
def test_peft_opens_the_adapters_and_transformers_the_merged_model(hf_folder, tmp_path, kind, targets):  # noqa: F811
    import peft

    folder = save_gpt2(tmp_path / "gpt2") if kind == "gpt2" else hf_folder(kind)
    config = config_of(f"hf:{folder}", lora={"targets": targets})

    def rank_main(comm):
        _, _, strategy = trained(comm, config, 2, MAX_NORM)
        checkpoint.save(tmp_path / "saved", strategy, step=2, extra={"config": config.model_dump(mode="json")})
        with strategy.full_params(), torch.no_grad():
            return strategy.model.eval()(TOKENS)

    logits = run_threads(rank_main, WORLD_SIZE)[0]
    for name, merged in (("adapters", False), ("merged", True)):
        run_export(ExportConfig(source=str(tmp_path / "saved"), out=str(tmp_path / name), merged=merged))
    auto = require_transformers().AutoModelForCausalLM
    opened = peft.PeftModel.from_pretrained(auto.from_pretrained(folder, dtype=torch.float32), tmp_path / "adapters")
    whole, report = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32, output_loading_info=True)
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    base = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(opened.eval()(TOKENS).logits, logits, rtol=0, atol=1e-6)
        torch.testing.assert_close(whole.eval()(TOKENS).logits, logits, rtol=0, atol=1e-5)
        assert not torch.allclose(base.eval()(TOKENS).logits, logits, atol=1e-3)
    written = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["r"]) == (str(folder), RANK)


@pytest.mark.redundant(but=["llama-tiny"])
@pytest.mark.parametrize("name", OURS)
def test_our_own_models_take_adapters_and_are_exported_merged(tmp_path, name):
    config = config_of({"name": name, **OURS[name]}, lora={"targets": ["all-linear"]})

    def rank_main(comm):
        found, _, strategy = trained(comm, config, 2, MAX_NORM)
        checkpoint.save(tmp_path / "saved", strategy, step=2, extra={"config": config.model_dump(mode="json")})
        with strategy.full_params(), torch.no_grad():
            return found, strategy.model.eval()(TOKENS)

    found, logits = run_threads(rank_main, WORLD_SIZE)[0]
    alone = trained(LocalCommunicator(), config.model_copy(update={"strategy": "zero0"}), 2, MAX_NORM)[0]
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)
    run_export(ExportConfig(source=str(tmp_path / "saved"), out=str(tmp_path / "merged"), merged=True))
    opened = require_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(opened.eval()(TOKENS).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.redundant
@pytest.mark.parametrize("changed", [{"lora": {"rank": 2}}, {}])
def test_adapters_of_weights_that_nobody_trained_are_warned_of(tiny_config, capsys, changed):
    run = build_run(
        tiny_config(model={"name": "llama-tiny", **OURS["llama-tiny"]}, **changed), LocalCommunicator(), CPU
    )
    run.close()
    warned = [line for line in capsys.readouterr().err.splitlines() if "stay random" in line]
    assert len(warned) == len(changed)
    assert all(line.startswith("warning: lora.rank = 2 trains adapters alone") for line in warned)


def test_a_run_of_adapters_evaluates_writes_and_is_begun_from(text_model, tiny_config, tmp_path):  # noqa: F811
    text = {"source": "text", "path": (str(tmp_path / "text.txt"),), "dir": str(tmp_path / "tokens")}
    common = {"data": text, "seq_len": 12, "max_steps": 4, "strategy": "zero3", "plan": {"enforce": True}}
    first = {"model": {"name": f"hf:{text_model}"}, "lora": {"rank": RANK, "dropout": 0.1}, "lr": 1e-2, **common}
    run_training(tiny_config(**first), predict=predict)
    assert main(["generate", str(tmp_path / "run"), "--prompt", "the quick", "--max-new-tokens", "4"]) == 0
    loss = local_score(EvalConfig(run=str(tmp_path / "run"))).loss
    logits = load_for_text(tmp_path / "run")[0](TOKENS)
    for lora in ({}, {"rank": 2}):  # all weights, or new adapters, from the model as the first run left it
        out = str(tmp_path / f"second-{len(lora)}")
        config = tiny_config(model={}, **common, lora=lora, init_from=str(tmp_path / "run"), out=out)
        run = build_run(config, LocalCommunicator(), CPU)
        with torch.no_grad():
            torch.testing.assert_close(run.strategy.model.eval()(TOKENS), logits, rtol=0, atol=1e-5)
        train(run)
        run.close()
    assert local_score(EvalConfig(run=str(tmp_path / "second-1"))).loss < loss + 1


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("stage", "targets"),
    [
        (2, ()),
        (3, ("layers.1.self_attn.q_proj",)),
        *(pytest.param(stage, (), marks=pytest.mark.soak) for stage in (1, 3)),
        *(pytest.param(stage, ("layers.1.self_attn.q_proj",), marks=pytest.mark.soak) for stage in (1, 2)),
    ],
)
def test_a_run_holds_and_sends_what_was_planned(byte_model, tiny_config, tmp_path, stage, targets):
    """Frozen weights are gathered, adapters reduced; blocks before the first adapter have no backward."""
    model, lora = {"name": f"hf:{byte_model}"}, {"rank": RANK, "targets": targets}
    data = {"source": "synthetic", "dir": str(tmp_path / "tokens"), "max_tokens": 3000}
    changes = {"model": model, "lora": lora, "strategy": f"zero{stage}", "seq_len": SEQ_LEN, "dtype": "bfloat16"}

    def rank_main(comm):
        config = tiny_config(**changes, data=data, max_steps=3, eval_interval=0, plan={"enforce": True})
        status, run = train_on(comm, config, predict=predict)
        return status, run.contract.num_checked, run.contract.num_broken, run.contract.difference

    for found in run_threads(rank_main, WORLD_SIZE):
        assert found == (0, 2, 0, "")


@pytest.fixture
def refusal(capsys, tmp_path, byte_model):
    """`refusal(*words)`: the one line that a training run ends with."""

    def ask(*words, verb=("train",), name=""):
        capsys.readouterr()
        out = ["--out", str(tmp_path / "run"), "--device", "cpu", "--data", "synthetic", "--seq-len", "12"]
        given = ["--model", name or f"hf:{byte_model}", *out] if verb == ("train",) else []
        assert main([*verb, *given, *map(str, words)]) == 2
        found = capsys.readouterr()
        assert re.fullmatch(r"error: [^\n]+: [^\n]+; [^\n]+\n", found.err), found.err
        assert not (tmp_path / "out").exists()
        return found.err

    return ask


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("q_prj", "'q_prj' is no layer of the model; did you mean"),
        ("wholly-other", "known: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; or all-linear"),
        ("embed_tokens", "is a Embedding, and no linear layer; name linear layers: down_proj"),
        ("lm_head", "lm_head shares its matrix with another layer"),
        ("self_attn", "is a LlamaAttention, and no linear layer"),
    ],
)
def test_a_target_is_a_linear_layer_of_its_own(byte_model, target, said):
    with torch.device("meta"), pytest.raises(UserError, match=re.escape(said)):
        build_model(f"hf:{byte_model}", lora=Lora(4, targets=("q_proj", target)))


def test_an_architecture_that_peft_has_no_targets_for_asks_for_names(refusal, hf_folder):  # noqa: F811
    said = refusal("--lora", "4", name=f"hf:{hf_folder('phi3')}")
    assert "lora.targets: peft has no targets of its own for phi3; name some of" in said


def test_a_folder_of_adapters_is_no_model(refusal, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    found = [refusal(name=f"hf:{tmp_path / 'adapter'}")]
    for verb in (("generate",), ("eval",), ("import",)):
        words = [tmp_path / "out"] if verb == ("import",) else []
        found.append(refusal(tmp_path / "adapter", *words, verb=verb))
    for said in found:
        assert "holds adapters of owner/base, and no whole model; write both as one model: peft's merge" in said


def test_a_run_goes_on_with_its_own_adapters_alone(refusal, tiny_config, tmp_path):
    short = {"max_steps": 2, "warmup_steps": 0}
    run_training(tiny_config(lora={"rank": 2}, **short))
    for lora, said in [
        ({"rank": 4}, "lora.rank: the checkpoint was saved with 2, now it is 4; use 2"),
        ({}, "lora.rank: the checkpoint was saved with 2, now it is 0; use 2"),
        ({"rank": 2, "alpha": 2}, "lora.alpha: the checkpoint was saved with 0.0, now it is 2.0; use 0.0"),
        ({"rank": 2, "targets": ["c_fc"]}, "lora.targets: the checkpoint was saved with "),
    ]:
        with pytest.raises(UserError, match=re.escape(said)):
            built(tiny_config(lora=lora, resume="auto", max_steps=3))
    said = refusal(tmp_path / "run", tmp_path / "out", verb=("export",))
    assert "merged: the model under the adapters of" in said
    assert "add --merged, which writes the whole model" in said
    run_training(tiny_config(**short, out=str(tmp_path / "plain")))
    again = tiny_config(lora={"rank": 2}, resume="auto", max_steps=3, out=str(tmp_path / "plain"))
    with pytest.raises(UserError, match=r"lora.rank: the checkpoint was saved with 0, now it is 2; use 0"):
        built(again)
    said = refusal(tmp_path / "plain", tmp_path / "out", "--merged", verb=("export",))
    assert "has no adapters; leave it out" in said
