"""Settings of nanoGPT and DeepSpeed become ours or are told; `tests/test_migration_pages.py` trains with both."""

import json
import tomllib

import pytest

from zeroshard.errors import UserError
from zeroshard.interop.deepspeed import read_deepspeed
from zeroshard.interop.migration import run_import_config
from zeroshard.interop.nanogpt import SETTINGS, read_nanogpt
from zeroshard.train.config.config import TrainConfig

SHAKESPEARE = """\
# train a miniature character-level shakespeare model
import time
out_dir = 'out-shakespeare-char'
eval_interval = 250 # keep frequent because we'll overfit
eval_iters = 200
always_save_checkpoint = False
wandb_run_name = 'mini-gpt' + str(time.time())
dataset = 'shakespeare_char'
gradient_accumulation_steps = 5 * 8
batch_size = 64
block_size = 256
n_embd = 6 * 64
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
min_lr = 1e-3 / 10
warmup_iters = 100
"""


def rows(migration):
    return {row.key: row for row in migration.rows}


def nanogpt(tmp_path, text, *flags):
    (tmp_path / "c.py").write_text(text)
    return read_nanogpt([str(tmp_path / "c.py"), *flags])


def deepspeed(tmp_path, **theirs):
    (tmp_path / "ds.json").write_text(json.dumps(theirs))
    migration = read_deepspeed([str(tmp_path / "ds.json")])
    assert all(row.why for row in migration.rows if row.fate == "ignored")
    return migration


def test_nanogpts_own_defaults_are_gpt2s_recipe():
    migration = read_nanogpt([])
    config = migration.config()
    assert (config.micro_batch_size, config.global_batch_size, config.seq_len) == (12, 480, 1024)
    assert (config.lr, config.min_lr, config.warmup_steps, config.max_steps) == (6e-4, 6e-5, 2000, 600_000)
    assert (config.model.name, config.model.vocab_size, config.model.bias) == ("gpt2-124m", 50_304, False)
    assert (config.model.activation, config.dtype, config.compile) == ("gelu", "bfloat16", True)
    assert (config.data.source, config.data.tokenizer, config.data.val_fraction) == ("openwebtext", "gpt2", 0.0005)
    assert (config.seed, config.device) == (1337, "cuda")
    assert list(rows(migration)) == list(SETTINGS)
    assert migration.lines() == []


def test_a_file_of_nanogpt_is_read_and_later_words_win(tmp_path):
    migration = nanogpt(tmp_path, SHAKESPEARE, "--device=cpu", "--batch_size=5", "--lr_decay_iters=50")
    config = migration.config()
    assert (config.min_lr, config.max_steps, config.decay_steps, config.model.n_embd) == (1e-4, 5000, 100, 384)
    assert (config.micro_batch_size, config.global_batch_size, config.eval_rows) == (5, 200, 1000)
    assert (config.data.source, config.data.tokenizer) == ("tinyshakespeare", "bytes")
    assert (config.device, config.dtype) == ("cpu", "float32")  # whatever nanoGPT's dtype says
    assert migration.lines() == ["ignored: wandb_run_name (its value is no constant)"]
    assert tomllib.loads(migration.text()) == migration.values
    before = read_nanogpt(["--batch_size=5", str(tmp_path / "c.py"), "--dataset=mine"]).config()
    assert (before.micro_batch_size, before.data.path, before.data.tokenizer) == (64, ("data/mine",), "gpt2")
    constant = read_nanogpt(["--decay_lr=False", "--learning_rate=3e-5"]).config()
    assert (constant.min_lr, constant.lr, constant.warmup_steps) == (3e-5, 3e-5, 0)


def test_ids_of_characters_have_no_tokenizer_of_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "meta.pkl").touch()
    values = read_nanogpt(["--dataset=mine"]).values
    assert values["data"] == {"source": "bin", "path": ["data/mine"], "tokenizer": "none"}
    assert "vocab_size" not in values["model"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("n_layer = 2\nn_head = = 3", r"c\.py: is no Python \(.*line 2"),
        ("n_layer = int(os.environ['X'])", r"line 1: the value of n_layer is no constant; write KEY = VALUE"),
        ("max_iters = 5\nlr_decay_iters = max_iters", r"line 2: the value of lr_decay_iters is no constant"),
        ("n_layer = - " * 900 + "3", r"is no Python|no constant"),
        ("if True:\n    batch_size = 4", r"line 1: it is no assignment KEY = VALUE"),
        ("n_layer = n_head = 4", r"line 1: it is no assignment"),
        ("n_layer += 1", r"line 1: it is no assignment"),
        ("from base import *", r"line 1: it is no assignment"),
        ("import sys\nsys.modules[__name__].n_layer = 3", r"line 2: it is no assignment"),
        ("batchsize = 4", r"batchsize: nanoGPT has no such setting; did you mean batch_size"),
        ("batch_size = 'four'", r"batch_size: 'four' is not a whole number of at least 0"),
    ],
)
def test_what_may_set_a_setting_and_is_not_read_is_refused(tmp_path, text, line):
    with pytest.raises(UserError, match=line) as caught:
        nanogpt(tmp_path, text)
    assert "\n" not in str(caught.value)


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
        read_deepspeed([str(tmp_path / "ds.json")])


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
        ({"zero_hpz_partition_size": 8}, {"node_copy": 8}),
        ({"stage": 2, "zero_hpz_partition_size": 8}, {}),
        ({"mics_shard_size": 4}, {"shard_size": 4}),
        ({"mics_shard_size": -1}, {}),  # DeepSpeed's default
        ({"zero_quantized_weights": True}, {"wire": {"weights": "int8"}}),
        ({"zero_quantized_gradients": True}, {"wire": {"grads": "int4"}}),
        ({"stage": 0, "zero_quantized_weights": True, "zero_quantized_gradients": True}, {}),
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
def test_what_zero_plus_plus_sends_and_what_is_offloaded_is_ours_too(theirs, ours, tmp_path):
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
