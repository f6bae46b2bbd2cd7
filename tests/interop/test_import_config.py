"""Settings of DeepSpeed become ours or are told; `tests/test_migration_pages.py` trains with them."""

import json
import tomllib

import pytest

from zeroshard.errors import UserError
from zeroshard.interop.deepspeed import read_deepspeed, run_import_config
from zeroshard.train.config.config import TrainConfig


def rows(migration):
    return {row.key: row for row in migration.rows}


def deepspeed(tmp_path, **theirs):
    (tmp_path / "ds.json").write_text(json.dumps(theirs))
    migration = read_deepspeed(tmp_path / "ds.json")
    assert all(row.why for row in migration.rows if row.fate == "ignored")
    return migration


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ([], "is not a JSON object"),
        ({"optimizer": {"type": "Lion"}}, r"optimizer\.type: Lion is not in the trainer"),
        ({"optimizer": {"params": {"betas": [1]}}}, r"optimizer\.params\.betas: \[1\] is not two numbers"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage: 4 is not a stage, 0 to 3"),
    ],
)
def test_a_value_that_deepspeed_does_not_take_is_refused(tmp_path, theirs, line):
    (tmp_path / "ds.json").write_text(json.dumps(theirs))
    with pytest.raises(UserError, match=line):
        read_deepspeed(tmp_path / "ds.json")


def test_deepspeeds_settings_become_ours_and_what_is_ignored_is_said(tmp_path, capsys):
    theirs = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "sequence_parallel_size": 2,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.98], "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 4, "warmup_num_steps": 1, "warmup_max_lr": 4e-4},
        },
        "wandb": {"enabled": True, "project": "p"},
    }
    migration = deepspeed(tmp_path, **theirs)
    config = migration.config()
    assert (config.strategy, config.global_batch_size, config.micro_batch_size) == ("zero3", 8, 2)
    assert config.sequence_parallel == 2
    assert (config.lr, config.beta1, config.beta2, config.grad_clip) == (4e-4, 0.9, 0.98, 0.5)
    assert (config.warmup_steps, config.max_steps, config.min_lr) == (1, 4, 0.0)
    assert (config.loss_scale, config.loss_scale_interval, config.dtype) == (4096.0, 500, "float32")
    assert (config.track.to, config.track.project) == (("wandb",), "p")
    table = rows(migration)
    assert (table["scheduler.type"].why, table["optimizer.params.lr"].fate) == (
        "changed: decays along a cosine in place of a line",
        "ignored",
    )
    assert run_import_config(["deepspeed", str(tmp_path / "ds.json")]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out) == migration.values
    assert 'state = "optimizer"' in out
    assert all(line.startswith("ignored: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"zero_hpz_partition_size": 8, "zero_quantized_weights": True}, {}),
        ({"offload_optimizer": {"device": "cpu", "pin_memory": True}}, {"offload": {"state": "optimizer"}}),
        ({"cpu_offload": True, "stage": 2}, {"offload": {"state": "optimizer"}}),
        ({"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}, {}),
        (
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu"}},
            {"offload": {"state": "all", "fraction": "0.5"}},
        ),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, {"offload": {"state": "optimizer"}}),
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}, "offload_param": {"device": "cpu"}},
            {"offload": {"state": "disk", "path": "/nvme"}},
        ),
        ({"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}, {"offload": {"state": "all"}}),
        (
            {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
            {"offload": {"state": "disk-all", "path": "/nvme"}},
        ),
        ({"offload_optimizer": {"ratio": 0.5, "buffer_count": 4}}, {}),
    ],
    ids=str,
)
def test_what_is_offloaded_is_ours_too(theirs, ours, tmp_path):
    migration = deepspeed(tmp_path, zero_optimization={"stage": 3, **theirs})
    migration.config()
    set_anyway = {"dtype": "float32", "strategy": f"zero{theirs.get('stage', 3)}", "warmup_steps": 0, "grad_clip": 1.0}
    assert migration.values == set_anyway | ours


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [("AdamW", {}, 0.0), ("adamw", {"torch_adam": True}, 0.01), ("Adam", {"torch_adam": True}, 0.0)],
)
def test_what_the_file_leaves_out_has_deepspeeds_defaults(tmp_path, kind, params, decay):
    migration = deepspeed(tmp_path, optimizer={"type": kind, "params": params})
    values = migration.values
    expected = {"lr": 1e-3, "min_lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": decay, "grad_clip": 1.0}
    assert {key: values[key] for key in expected} == expected  # in the file, whatever our defaults are
    assert (values["strategy"], values["warmup_steps"], values["dtype"]) == ("zero0", 0, "float32")
    assert rows(migration)["gradient_clipping"].fate == "default"


@pytest.mark.parametrize(
    ("scheduler", "params", "rates"),
    [
        ("WarmupLR", {}, (1e-3, 1e-3, 1000)),  # it sets its own rate, up to its own default
        ("WarmupLR", {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}, (1e-3, 1e-3, None)),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}, (1e-3, 0.0, 3)),
        ("WarmupCosineLR", {"cos_min_ratio": 0.5, "warmup_num_steps": 3}, (3e-4, 1.5e-4, 3)),
        ("OneCycle", {"cycle_max_lr": 0.1}, (3e-4, 3e-4, 0)),
    ],
)
def test_rates_are_those_of_deepspeeds_schedulers(tmp_path, scheduler, params, rates):
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4}}
    migration = deepspeed(tmp_path, optimizer=optimizer, scheduler={"type": scheduler, "params": params})
    values = migration.values
    assert (values["lr"], values["min_lr"], values.get("warmup_steps")) == (*map(pytest.approx, rates[:2]), rates[2])
    migration.config()


@pytest.mark.parametrize("key", ["bf16", "fp16", "bfloat16"])
def test_auto_is_our_default_as_the_table_says(tmp_path, key):
    assert deepspeed(tmp_path, **{key: {"enabled": "auto"}}).config().dtype == TrainConfig().dtype
    assert deepspeed(tmp_path, **{key: {"enabled": False}}).config().dtype == "float32"
    both = {key: {"enabled": "auto"}, "bf16": {"enabled": True}}
    assert deepspeed(tmp_path, **both).config().dtype == "bfloat16"
    half = deepspeed(tmp_path, fp16={"enabled": True}).config()
    assert (half.dtype, half.loss_scale, half.loss_scale_interval) == ("float16", 65536.0, 1000)
