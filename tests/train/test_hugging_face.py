"""Models of `transformers` behind ours: the same function, the same weights, trained sharded as in one process."""

import itertools
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dry_run import compared
from hf_models import (
    ARCHITECTURES,
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
from live_bytes import LiveBytes
from soak import soaking
from tiny_runs import events_of, summary_of
from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.integrations.hf_export import run_export
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.run_plan import predict
from zeroshard.models import build_model
from zeroshard.models.hugging_face import weights
from zeroshard.train.config.command_settings import EvalConfig, ExportConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import load_config
from zeroshard.train.inference.evaluation import local_score
from zeroshard.train.inference.generate import load_for_text, sample
from zeroshard.train.setup.assemble import sharded
from zeroshard.train.setup.hugging_face import with_model_files
from zeroshard.train.start import run_training

NUM_STEPS, WORLD_SIZE = 3, 2
CPU = torch.device("cpu")
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def trained_by_transformers(folder):
    """Losses and norms, and logits, of one process with `transformers`' own model and loss."""
    transformers = require_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    decayed = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    found = trained_alone(model, torch.optim.AdamW(groups, **ADAMW), NUM_STEPS)
    with torch.no_grad():
        return found, model.eval()(input_ids=list(batches(NUM_STEPS))[-1][0]).logits, model


def run_config(folder, strategy="zero3", **changes):
    model = {"name": f"hf:{folder}", **changes.pop("model", {})}
    data = {"source": "synthetic"}
    settings = {"lr": 1e-3, "fused": False, "device": "cpu", "strategy": strategy, "seq_len": SEQ_LEN, "out": "x"}
    settings["dtype"] = "float32"
    return TrainConfig.model_validate({"model": model, "data": data, **settings, **changes})


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_architecture_trains_at_each_stage_as_one_process_and_is_exported_whole(
    hf_folder,  # noqa: F811
    tmp_path,
    kind,
):
    folder = hf_folder(kind)
    expected, logits, model = trained_by_transformers(folder)
    tokens = list(batches(NUM_STEPS))[-1][0]
    saved = tmp_path / "step-00000003"

    def rank_main(comm, stage):
        config = with_model_files(run_config(folder, f"zero{stage}"))
        losses, model, strategy = trained(comm, config, NUM_STEPS)
        if stage == 3:
            checkpoint.save(saved, strategy, step=NUM_STEPS, extra={"config": config.model_dump(mode="json")})
        with strategy.full_params(), torch.no_grad():
            return losses, model.eval()(tokens)

    for stage in (1, 2, 3) if kind in ("llama", "mixtral") or soaking() else (3,):
        for losses, found in run_threads(lambda comm, stage=stage: rank_main(comm, stage), WORLD_SIZE):
            torch.testing.assert_close([loss for loss, _ in losses], [loss for loss, _ in expected], rtol=0, atol=1e-5)
            torch.testing.assert_close(found, logits, rtol=0, atol=2e-4)
    run_export(ExportConfig(source=str(saved), out=str(tmp_path / "exported")))
    again, report = type(model).from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=tokens).logits, found)
    written, original = (load_file(each / "model.safetensors") for each in (tmp_path / "exported", folder))
    assert {name: value.shape for name, value in written.items()} == {k: v.shape for k, v in original.items()}


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # whose head is one product; whose logits are capped
def test_the_training_loss_is_smoothed(hf_folder, kind):  # noqa: F811
    model = build_model(f"hf:{hf_folder(kind)}")
    model.take_loss_options(0.1, 1e-2)
    tokens, targets = next(batches(1))
    logits, flat = model.eval()(tokens).flatten(0, 1), targets.flatten()
    smoothed = torch.nn.functional.cross_entropy(logits, flat, label_smoothing=0.1)
    smoothed += 1e-2 * logits[flat != -100].logsumexp(-1).square().mean()
    torch.testing.assert_close(model.train()(tokens, targets), smoothed)
    plain = torch.nn.functional.cross_entropy(logits, flat)
    torch.testing.assert_close(model.eval()(tokens, targets), plain)


@pytest.mark.redundant
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_reads_the_bytes_of_its_shard_and_holds_a_unit_beside_it(tmp_path, monkeypatch, world_size):
    """Of bf16 weights in several files, with tied embeddings: shard, one unit, and a tenth."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "vocab_size": 200}
    model = make_model("llama", **sizes).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    numel = sum(param.numel() for param in model.parameters())
    units = [sum(param.numel() for param in block.parameters()) for block in model.model.layers]
    unit_bytes = 4 * max(units[0], numel - sum(units))
    read = []
    inner = weights.read_elements
    monkeypatch.setattr(weights, "READ_AT_ONCE", 512)
    monkeypatch.setattr(
        weights,
        "read_elements",
        lambda tensor, start, values: read.append((tensor.name, start, values.numel())) or inner(tensor, start, values),
    )
    by_rank = []
    for rank in range(world_size):
        read.clear()
        config = run_config(tmp_path, fused=False)
        with LiveBytes() as live:
            found, strategy = sharded(config, 1, None, NullCommunicator(world_size, rank), CPU)
        shard_bytes = sum(strategy.memory_bytes().values())
        assert shard_bytes == pytest.approx(4 * numel / world_size, rel=0.02)
        assert live.peak <= 1.1 * (shard_bytes + unit_bytes), rank
        by_rank.append(sorted(read))
        del found, strategy
    assert all(sum(each[2] for each in parts) <= 1.02 * numel / world_size for parts in by_rank)
    covered: dict[str, int] = {}
    for name, start, count in sorted(itertools.chain(*by_rank)):
        assert start == covered.get(name, 0)  # no element twice, and none left out
        covered[name] = start + count
    assert sum(covered.values()) == numel


@pytest.mark.redundant(but=["llama"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_every_strategy_trains_alike(hf_folder, process_group, kind):  # noqa: F811
    expected = trained(LocalCommunicator(), run_config(hf_folder(kind), "zero0"), 3)[0]
    for strategy in ("ddp", "fsdp2", "zero1-torch"):
        losses = trained(LocalCommunicator(), run_config(hf_folder(kind), strategy), 3)[0]
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("activation checkpointing", {"model": {"activation_checkpointing": "full"}}),
        ("eager attention", {"model": {"attention": "eager"}}),
        ("compiled", {"compile": True, "compile_backend": "eager"}),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo hides it elsewhere
def test_how_a_model_computes_changes_nothing(hf_folder, how, settings):  # noqa: F811
    expected = trained(LocalCommunicator(), run_config(hf_folder("llama")), 3)[0]
    losses = trained(LocalCommunicator(), run_config(hf_folder("llama"), **settings), 3)[0]
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.redundant(but=["llama"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral"])
def test_initial_values_from_a_configuration_are_those_of_every_world(hf_folder, kind):  # noqa: F811
    config = run_config(hf_folder(kind), model={"from_config": True})
    one = build_model(config.model.name, overrides={"from_config": True}).state_dict()

    def rank_main(comm):
        return sharded(config, VOCAB_SIZE, None, comm, CPU)[1].state_dict()

    for state in run_threads(rank_main, WORLD_SIZE):
        assert all(torch.equal(tensor, one[name]) for name, tensor in state.items())


@pytest.mark.redundant
@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_recomputed_block_draws_the_same_noise_without_a_module_for_it(how, tmp_path):
    make_model("mixtral", router_jitter_noise=0.3).save_pretrained(tmp_path)
    tokens, targets = next(batches(1))
    found = []
    for again in ("none", how):
        model = build_model(f"hf:{tmp_path}", overrides={"activation_checkpointing": again}).train()
        torch.manual_seed(3)
        model(tokens, targets).backward()
        found.append([param.grad for param in model.parameters() if param.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.redundant(but=["mistral"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_neox"])
def test_a_document_sees_nothing_of_those_before_it(hf_folder, kind):  # noqa: F811
    model = build_model(f"hf:{hf_folder(kind)}").eval()
    model.eos_id = 2
    first, second = torch.tensor([5, 6, 7, 8]), torch.tensor([2, 9, 10, 11])
    with torch.no_grad():
        together = model(torch.cat([first, second])[None])[0]
        assert torch.allclose(together[4:], model(second[None])[0], atol=1e-5)
        assert not torch.allclose(
            together[4:],
            build_model(f"hf:{hf_folder(kind)}").eval()(torch.cat([first, second])[None])[0][4:],
            atol=1e-3,
        )


def test_a_run_goes_on_evaluates_writes_and_is_exported_without_the_folder_it_came_from(
    text_model,  # noqa: F811
    tiny_config,
    tmp_path,
):
    text = {"source": "text", "path": (str(tmp_path / "text.txt"),), "dir": str(tmp_path / "tokens")}

    def config(**changes):
        settings = {"model": f"hf:{text_model}", "data": text, "strategy": "zero3", "checkpoint_interval": 2}
        return tiny_config(**{**settings, "max_steps": 4, "eval_interval": 0, "decay_steps": 4, **changes})

    assert run_training(config(out=str(tmp_path / "whole"))) == 0
    before = local_score(EvalConfig(run=f"hf:{text_model}", data_dir=str(tmp_path / "tokens"), seq_len=16))
    assert run_training(config(out=str(tmp_path / "cut"), max_steps=2)) == 0
    shutil.rmtree(text_model)
    saved = tmp_path / "cut" / "config.toml"
    assert '"rope_type":"llama3"' in saved.read_text().replace("\\", "")
    again = load_config(saved).model_copy(update={"max_steps": 4, "resume": "auto"})
    assert run_training(again) == 0
    whole, cut = (events_of(tmp_path / name, "step") for name in ("whole", "cut"))
    assert whole[-1]["loss"] == cut[-1]["loss"]
    after = local_score(EvalConfig(run=str(tmp_path / "cut")))
    assert after.loss < before.loss
    run_export(ExportConfig(source=str(tmp_path / "cut"), out=str(tmp_path / "exported"), dtype="bfloat16"))
    transformers = require_transformers()
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    model, tokenizer = load_for_text(tmp_path / "cut")
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    ids = torch.from_numpy(tokenizer.encode("the quick brown"))
    with torch.no_grad():
        assert torch.equal(exported(ids[None]).logits, model(ids[None]))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert theirs("the quick brown")["input_ids"] == ids.tolist()
    assert theirs.chat_template == "{{ messages[0].content }}"
    drawn = [list(sample(model, ids, 5, temperature=0.0, use_cache=cached)) for cached in (True, False)]
    assert drawn[0] == drawn[1]
    assert local_score(EvalConfig(run=f"hf:{tmp_path}/exported", data_dir=str(tmp_path / "tokens"), seq_len=16))


def test_a_plan_is_what_a_step_takes(hf_folder):  # noqa: F811
    """From ``config.json`` alone, of more blocks than are traced."""
    model = {"name": f"hf:{hf_folder('qwen3')}", "n_layer": 6, "from_config": True}
    settings = {"gpu": "rtx-4090", "gpus": 2, "seq_len": 16, "micro_batch": 2, "dtype": "float32", "stage": "3"}
    config = PlanConfig.model_validate({"model": model, **settings})
    found = compared(config)
    assert found["messages"]["measured"] > 6
    for name in ("peak", "params", "grads", "optimizer", "messages", "message bytes"):
        assert found[name]["predicted"] == pytest.approx(found[name]["measured"], rel=0.01), name


def test_a_run_of_experts_in_float32_is_held_to_what_can_be_planned(hf_folder, tiny_config, caplog, capsys):  # noqa: F811
    """Their forward has no shapes in that dtype, so activations are not foreseen; what is held and sent is."""
    folder = hf_folder("mixtral")
    caplog.clear()  # of what is imported with transformers
    model = {"name": f"hf:{folder}", "vocab_size": 300, "from_config": True}
    plan = {"enforce": True}
    config = tiny_config(model=model, strategy="zero3", plan=plan, max_steps=4, eval_interval=0)
    assert run_training(config, predict) == 0
    assert not [
        record for record in caplog.records if record.levelno > logging.INFO
    ]  # torch logs a traceback otherwise
    assert "peak not predicted: its forward " in capsys.readouterr().out
    summary = summary_of(config.out)
    assert summary["status"] == "ok"
    assert "plan" in str(summary)
