"""Settings of DeepSpeed become ours or are told; `tests/test_migration_pages.py` trains with them."""

import json
import math
import tomllib

import pytest

from zeroshard.host.errors import UserError
from zeroshard.integrations.deepspeed import read_deepspeed, run_import_config
from zeroshard.optim import learning_rate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.resume import schedule_of


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
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            r"adam_w_mode: .* use",
        ),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, r"amsgrad: the trainer's AdamW has not true"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, r"bias_correction: .* has not false"),
        *(
            ({"scheduler": {"type": each}}, rf"scheduler.type: {each} is not in")
            for each in ("OneCycle", "LRRangeTest")
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, r"total_num_steps: WarmupDecayLR has none; give it"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, r"'cubic' is not log or linear"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "0 is not a whole number above 0"),
        (
            {"scheduler": {"type": "WarmupLR"}, "optimizer": {"type": "Adam", "params": {"lr": 3e-4}}},
            r"warmup_max_lr: left out, it is 0.001 in some releases of DeepSpeed, and the optimizer's lr of 0.0003 in",
        ),
    ],
)
def test_what_the_trainer_does_not_compute_or_deepspeed_does_not_take_is_refused(tmp_path, theirs, line):
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
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
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
    assert (table["scheduler.type"].why, table["optimizer.params.lr"].fate) == ("the same rate at each step", "ignored")
    gathers = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    assert (table[gathers].fate, "`zeroshard export`" in table[gathers].why) == ("mapped", True)
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


def published(kind, lr, params, num_steps):
    """The rates of DeepSpeed's steps: that of its scheduler before its first call, then after each of the others.

    By deepspeed/runtime/lr_schedules.py of 0.19: ``k`` counts the scheduler's calls from 0.
    """
    warm = max(2, params.get("warmup_num_steps", 1000))
    total = params.get("total_num_steps")

    def climbed(k):
        return k / warm if params.get("warmup_type") == "linear" else math.log(k + 1) / math.log(warm)

    def rate(k):
        if kind == "WarmupCosineLR":
            low = params.get("warmup_min_ratio", 0.0)
            if k < 0:
                return 0.0
            if k < warm:
                return lr * (low + (1 - low) * climbed(k))
            end = params.get("cos_min_ratio", 0.0001)
            over = min(1.0, (k - warm + 1) / max(1, total - warm))
            return lr * (end + (1 - end) * (1 + math.cos(math.pi * over)) / 2)
        low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", 0.001)
        if k < 0:
            return low
        after = 1.0 if kind == "WarmupLR" else max(0.0, (total - k) / max(1.0, total - warm))
        return low + (high - low) * (climbed(k) if k < warm else after)

    return [rate(step - 1) for step in range(num_steps)]


@pytest.mark.parametrize("warmup", ["log", "linear", None])
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_max_lr": 4e-4, "warmup_num_steps": 30}),
        ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 4e-4, "warmup_num_steps": 1}),
        ("WarmupDecayLR", {"total_num_steps": 100, "warmup_num_steps": 30}),
        (
            "WarmupDecayLR",
            {"total_num_steps": 80, "warmup_min_lr": 1e-5, "warmup_max_lr": 4e-4, "warmup_num_steps": 30},
        ),
        ("WarmupDecayLR", {"total_num_steps": 30, "warmup_max_lr": 4e-4, "warmup_num_steps": 30}),
        ("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 30, "warmup_min_ratio": 0.1}),
        ("WarmupCosineLR", {"total_num_steps": 80, "warmup_num_steps": 2, "cos_min_ratio": 0.1}),
        ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 30}),
    ],
)
def test_rates_are_those_of_deepspeeds_schedulers_at_each_step(kind, params, warmup, tmp_path):
    params = params | ({"warmup_type": warmup} if warmup else {})
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4, "eps": 1e-6}}
    config = deepspeed(tmp_path, optimizer=optimizer, scheduler={"type": kind, "params": params}).config()
    assert config.optim.eps == 1e-6
    schedule = schedule_of(config.model_dump())
    found = [learning_rate(step, **schedule) for step in range(100)]
    assert found == pytest.approx(published(kind, 3e-4, params, 100), rel=1e-12, abs=0)


def test_without_a_scheduler_or_with_auto_rates_are_constant_or_ours(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4}}
    schedule = schedule_of(deepspeed(tmp_path, optimizer=optimizer).config().model_dump())
    assert {learning_rate(step, **schedule) for step in range(100)} == {3e-4}
    params = {"warmup_max_lr": "auto", "warmup_min_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    config = deepspeed(tmp_path, scheduler={"type": "WarmupDecayLR", "params": params}).config()
    assert (config.lr, config.min_lr, config.max_steps) == (TrainConfig().lr, 0.0, TrainConfig().max_steps)


@pytest.mark.parametrize("key", ["bf16", "fp16", "bfloat16"])
def test_auto_is_our_default_as_the_table_says(tmp_path, key):
    assert deepspeed(tmp_path, **{key: {"enabled": "auto"}}).config().dtype == TrainConfig().dtype
    assert deepspeed(tmp_path, **{key: {"enabled": False}}).config().dtype == "float32"
    both = {key: {"enabled": "auto"}, "bf16": {"enabled": True}}
    assert deepspeed(tmp_path, **both).config().dtype == "bfloat16"
    half = deepspeed(tmp_path, fp16={"enabled": True}).config()
    assert (half.dtype, half.loss_scale, half.loss_scale_interval) == ("float16", 65536.0, 1000)
