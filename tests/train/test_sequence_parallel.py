"""Runs whose ranks share sequences: the losses of one process on the same rows, whatever else a run does."""

import json
import shutil

import pytest

import chats
from hf_models import text_model  # noqa: F401 -- a fixture
from tiny_runs import events_of, summary_of, train_on, trained
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.run_plan import predict
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig

LLAMA = {"name": "llama-tiny", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_kv_head": 2, "ffn_hidden": 48}


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert found[key] == pytest.approx(values, rel=3e-5), key


def shares(size, **changes):
    """Settings of a run of 4 rows a step, of ``size`` ranks a row."""
    given = {"global_batch_size": 4, "strategy": "zero3", "max_steps": 2, "eval_interval": 2}
    return {"model": LLAMA, "sequence_parallel": size, **given, **changes}


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("size", "world", "changes"),
    [
        (2, 2, {"strategy": "zero0"}),
        (2, 4, {"strategy": "zero2", "shard_size": 2}),
        (4, 4, {"model": {**LLAMA, "activation_checkpointing": "offload"}, "tiles": 2}),
        (2, 4, {"optimizer": "muon", "ema_decay": 0.9}),
    ],
)
def test_a_run_has_the_losses_norms_and_evaluations_of_one_process(tiny_config, tmp_path, size, world, changes):
    alone = trained(tiny_config(**shares(1, **{k: v for k, v in changes.items() if k in ("optimizer", "ema_decay")})))
    found = trained(tiny_config(**shares(size, **changes), out=str(tmp_path / "shared")), world)
    assert_close(found, alone)
    start = events_of(tmp_path / "shared", "start")[0]
    assert start["tokens_per_step"] == 4 * 16
    assert f" of {size} ranks that share them x 16 tokens = 64 tokens a step" in start["about"]["batch"]


@pytest.fixture
def examples_config(tiny_config, tmp_path):
    """`examples_config(size, **changes)`: prompts and answers, of which the answers count; parts without any target."""
    path = chats.write_rows(tmp_path / "rows.jsonl", chats.pairs(80))

    def make(size, packing, out, **changes):
        data = {"source": "text", "path": (str(path),), "format": "prompt", "packing": packing}
        data |= {"dir": str(tmp_path / "tokens"), "val_fraction": 0.2}
        given = {"data": data, "seq_len": 48, "out": str(tmp_path / out), **changes}
        return tiny_config(**shares(size, **given))

    return make


@pytest.mark.redundant(but=["False-changes1"])
@pytest.mark.parametrize(
    ("packing", "changes"), [(True, {}), (False, {"lora": {"rank": 2}}), (True, {"dtype": "bfloat16"})]
)
def test_the_mean_over_targets_is_exact_where_ranks_have_unequal_numbers(examples_config, packing, changes):
    alone = trained(examples_config(1, packing, "alone", **changes))
    found = trained(examples_config(4, packing, "shared", **changes), 4)
    if "dtype" not in changes:
        assert_close(found, alone)
    else:
        for key, values in alone.items():
            assert found[key][0] == pytest.approx(values[0], rel=0.01)


@pytest.mark.redundant(but=["False"])
@pytest.mark.parametrize("packing", [False, True])
def test_a_model_of_transformers_is_fine_tuned_over_a_sequence(text_model, examples_config, packing):  # noqa: F811
    model = {"name": f"hf:{text_model}"}
    changes = {"model": model, "lora": {"rank": 2}, "global_batch_size": 8, "strategy": "zero2"}
    alone, found = (
        trained(examples_config(size, packing, f"out{size}", **changes), world) for size, world in ((1, 1), (2, 4))
    )
    assert_close(found, alone)


def test_text_that_is_streamed_is_cut_alike(tiny_config, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} abcd " * 9}) + "\n" for number in range(400)))
    data = {"source": "text", "path": (str(path),), "streaming": True, "val_fraction": 0.1}
    alone = trained(tiny_config(**shares(1, data=data)))
    assert_close(trained(tiny_config(**shares(2, data=data), out=str(tmp_path / "shared")), 4), alone)


@pytest.mark.redundant
def test_a_run_resumes_at_another_number_of_ranks_to_a_sequence(tiny_config, tmp_path, capsys):
    given = {"max_steps": 4}
    wanted = trained(tiny_config(**shares(1, **given)))
    first = tiny_config(**shares(2, **given), out=str(tmp_path / "first"), checkpoint_interval=2)
    run_threads(lambda comm: train_on(comm, first, until=2), 2)
    manifest = json.loads(next((tmp_path / "first" / "checkpoints").glob("*/manifest.json")).read_text())
    for size, world in ((4, 4), (2, 4), (1, 1)):
        folder = tmp_path / f"{size}-{world}"
        shutil.copytree(tmp_path / "first", folder)
        found = trained(tiny_config(**shares(size, strategy="zero1", **given), out=str(folder), resume="auto"), world)
        assert_close(found, {key: value for key, value in wanted.items() if key == "val" or key > 2})
        assert "sequence_parallel was" not in capsys.readouterr().err
    assert "sequence" not in json.dumps({key: value for key, value in manifest.items() if key != "extra"})


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"model": {**LLAMA, "activation_checkpointing": "full"}, "global_batch_size": 12}),
        (4, {"strategy": "zero2", "model": {**LLAMA, "n_head": 4, "n_kv_head": 1}}),
        (2, {"lora": {"rank": 2}, "model": {**LLAMA, "activation_checkpointing": "every:2"}, "strategy": "zero1"}),
        (2, {"dtype": "bfloat16", "model": {**LLAMA, "activation_checkpointing": "selective"}}),
        (
            2,
            {
                "model": {"name": "gpt2-demo", "n_layer": 2, "n_embd": 16, "activation_checkpointing": "full"},
                "tiles": 2,
            },
        ),
    ],
)
def test_bytes_of_all_to_alls_are_planned_exactly(tiny_config, tmp_path, world, changes):
    config = tiny_config(**shares(2, **{"eval_interval": 0, "max_steps": 3, **changes}), plan={"enforce": True})
    run_threads(lambda comm: train_on(comm, config, predict=predict), world)
    plan = summary_of(config.out)["plan"]
    assert plan["num_checked"] == 2
    assert plan["num_broken"] == 0, plan["difference"]
    sent = plan["messages"]["all_to_all"]
    assert sent["bytes"]["predicted"] == sent["bytes"]["measured"] > 0
    assert sent["number"]["predicted"] == sent["number"]["measured"]


def test_all_to_alls_of_a_model_of_transformers_are_planned_exactly(text_model, examples_config):  # noqa: F811
    changes = {"model": {"name": f"hf:{text_model}"}, "eval_interval": 0, "plan": {"enforce": True}}
    config = examples_config(2, True, "planned", **changes)
    run_threads(lambda comm: train_on(comm, config, predict=predict), 2)
    plan = summary_of(config.out)["plan"]
    assert (plan["num_checked"], plan["num_broken"]) == (1, 0), plan["difference"]
    sent = plan["messages"]["all_to_all"]["bytes"]
    assert sent["predicted"] == sent["measured"] > 0


@pytest.mark.redundant
def test_replicas_that_take_local_steps_share_sequences_inside(tiny_config, tmp_path):
    local = {"every": 2, "outer_lr": 0.7}
    wanted = trained(tiny_config(**shares(1, shard_size=1, strategy="zero1", local_steps=local, max_steps=3)), 2)
    given = shares(2, shard_size=2, strategy="zero1", local_steps=local, max_steps=3, out=str(tmp_path / "shared"))
    assert_close(trained(tiny_config(**given), 4), wanted)


def _losses(comm, config):
    return train_on(comm, config, until=2)[0]


@pytest.mark.redundant
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1-torch"])
def test_strategies_of_torch_train_over_sequences(tiny_config, tmp_path, gloo_ranks, strategy):
    wanted = trained(tiny_config(**shares(1)))
    config = tiny_config(**shares(2, strategy=strategy), out=str(tmp_path / strategy))
    gloo_ranks(2).run(_losses, config)
    found = {}
    for event in events_of(config.out):
        if event["event"] in ("step", "eval"):
            key = event["step"] if event["event"] == "step" else "val"
            found[key] = (event["loss"], event.get("grad_norm", 0.0))
    assert_close(found, wanted)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sequence_parallel": 32}, r"seq_len: 16 tokens are fewer than the 32 ranks that share them"),
        ({"sequence_parallel": 3}, r"seq_len: 16 tokens cannot be cut into 3 equal parts .*; give 15 or 18, or change"),
        ({"sequence_parallel": 0}, r"sequence_parallel: 0 is below 1; give 1 or more"),
        (
            {"sequence_parallel": 4, "shard_size": 2, "strategy": "zero1", "local_steps": {"every": 2}},
            r"sequence_parallel: 4 ranks share a sequence, and a replica .* has 2 \(shard_size\); choose a divisor",
        ),
        (
            {"sequence_parallel": 2, "compile": True, "model": {"activation_checkpointing": "selective"}},
            r"model.activation_checkpointing: selective with compile and sequence_parallel: .*; leave one out",
        ),
        (
            {"sequence_parallel": 2, "reproducible": 4},
            r"reproducible: 4 is given, and sequence_parallel cuts sequences: .*; leave one of the two out",
        ),
        (
            {"sequence_parallel": 2, "nproc": 1, "nnodes": "1:2", "rdzv_endpoint": "a:1"},
            r"sequence_parallel: groups of 2 ranks that share a sequence do not partition a world of 1;",
        ),
    ],
)
def test_what_cannot_be_shared_is_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        validate(TrainConfig, {"seq_len": 16, **changes})


def test_ranks_and_batches_that_do_not_fit_are_one_line(tiny_config):
    for size, world, changes, line in (
        (2, 3, {}, r"sequence_parallel: groups of 2 ranks .* do not partition a world of 3; choose one of 1, 3"),
        (2, 4, {"global_batch_size": 3}, r"3 is no multiple of 2 \(micro_batch_size\) x 2 groups of 2 ranks that"),
        (8, 8, {}, r"sequence_parallel: 8 ranks do not divide 4 query heads; choose one of 1, 2, 4"),
    ):
        with pytest.raises(UserError, match=line):
            run_threads(
                lambda comm, given=(size, changes): train_on(comm, tiny_config(**shares(given[0], **given[1]))), world
            )
