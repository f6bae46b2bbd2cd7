import json
import pickle
import tomllib

import pytest

from zeroshard.errors import UserError
from zeroshard.interop.deepspeed import read_deepspeed
from zeroshard.interop.import_config import run_import_config
from zeroshard.interop.nanogpt import DEFAULTS, read_nanogpt
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.loop import run_training

SHAKESPEARE = """\
# train a miniature character-level shakespeare model
import time
out_dir = 'out-shakespeare-char'
eval_interval = 250 # keep frequent because we'll overfit
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False # override via command line if you like
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt' + str(time.time())
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = max_iters
min_lr = learning_rate / 10
beta2 = 0.99
warmup_iters = 100
open('/tmp/executed-by-mistake', 'w')
"""


@pytest.fixture
def shakespeare(tmp_path):
    path = tmp_path / "train_shakespeare_char.py"
    path.write_text(SHAKESPEARE)
    return path


def rows(migration):
    return {row.key: row for row in migration.rows}


def test_nanogpts_own_defaults_are_gpt2s_recipe():
    config = read_nanogpt([]).config()
    assert (config.micro_batch_size, config.global_batch_size, config.seq_len) == (12, 480, 1024)
    assert (config.lr, config.min_lr, config.warmup_steps, config.max_steps) == (6e-4, 6e-5, 2000, 600_000)
    assert (config.model.name, config.model.vocab_size, config.model.bias) == ("gpt2-124m", 50_304, False)
    assert (config.data.source, config.data.tokenizer, config.data.val_fraction) == ("openwebtext", "gpt2", 0.0005)
    assert (config.dtype, config.compile, config.seed, config.device) == ("bfloat16", True, 1337, "cuda")


def test_every_key_of_nanogpt_has_a_fate_and_is_said():
    migration = read_nanogpt([])
    assert list(rows(migration)) == list(DEFAULTS)
    assert all(row.why for row in migration.rows if row.fate != "mapped")


def test_a_file_of_nanogpt_is_read_and_not_executed(shakespeare, tmp_path):
    from pathlib import Path

    migration = read_nanogpt([str(shakespeare), "--device=cpu", "--compile=False", "--dtype=float32"])
    config = migration.config()
    assert not Path("/tmp/executed-by-mistake").exists()
    assert (config.min_lr, config.max_steps, config.beta2) == (1e-4, 5000, 0.99)
    assert (config.model.n_layer, config.model.n_embd, config.model.dropout) == (6, 384, 0.2)
    assert (config.data.source, config.data.tokenizer) == ("tinyshakespeare", "bytes")
    assert (config.device, config.compile, config.dtype) == ("cpu", False, "float32")
    table = rows(migration)
    assert table["dataset"].fate == "changed"
    assert table["wandb_run_name"].why == "line 10 is no constant"
    assert table["lr_decay_iters"].fate == "mapped"
    shorter = read_nanogpt(["--max_iters=100", "--warmup_iters=5", "--lr_decay_iters=50"]).config()
    assert (shorter.max_steps, shorter.decay_steps) == (100, 50)


def test_what_is_printed_is_a_configuration_that_trains(shakespeare, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcd\n" * 2000)
    flags = ["--device=cpu", "--compile=False", "--dtype=float32", "--max_iters=3", "--warmup_iters=1"]
    flags += ["--block_size=16", "--n_layer=2", "--n_embd=16", "--n_head=2", "--batch_size=2", "--eval_iters=2"]
    assert run_import_config(["nanogpt", str(shakespeare), *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# From nanoGPT: ")
    values = tomllib.loads(printed)
    values["out"] = str(tmp_path / "run")
    values["data"] |= {"source": "text", "path": [str(text)], "dir": str(tmp_path / "tokens")}
    assert run_training(TrainConfig.model_validate(values)) == 0


def test_no_decay_is_a_constant_rate():
    config = read_nanogpt(["--decay_lr=False", "--learning_rate=3e-5"]).config()
    assert (config.min_lr, config.lr, config.warmup_steps) == (3e-5, 3e-5, 0)


def test_other_data_are_its_own_token_files():
    config = read_nanogpt(["--dataset=mine"]).config()
    assert (config.data.source, config.data.path, config.data.tokenizer) == ("bin", ("data/mine",), "gpt2")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nanogp"], r"import-config: 'nanogp' cannot be imported; did you mean nanogpt"),
        ([], r"import-config: the name of the other program is missing; choose one of nanogpt, deepspeed"),
        (["nanogpt", "--batchsize=1"], r"batchsize: nanoGPT has no such setting; did you mean batch_size"),
        (["nanogpt", "--batch_size"], r"--batch_size: has no value; write --batch_size=VALUE"),
        (["nanogpt", "nowhere.py"], r"nowhere\.py: cannot be read \(No such file"),
        (["nanogpt", "--n_head=7"], r"model\.n_head: 7 heads do not divide a width of 768"),
        (["deepspeed", "nowhere.json"], r"nowhere\.json: cannot be read"),
        (["deepspeed"], r"import-config: deepspeed takes one file"),
    ],
)
def test_what_cannot_be_read_is_one_line(words, line):
    with pytest.raises(UserError, match=line):
        run_import_config(words)


def test_a_file_that_is_no_python_names_its_line(tmp_path):
    (tmp_path / "a.py").write_text("n_layer = 2\nn_head = = 3\n")
    with pytest.raises(UserError, match=r"a\.py: is no Python \(.*line 2"):
        read_nanogpt([str(tmp_path / "a.py")])


DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 5,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": False},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 4, "warmup_num_steps": 1, "warmup_max_lr": 3e-4},
    },
    "wall_clock_breakdown": False,
}


@pytest.fixture
def deepspeed(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    return path


def test_deepspeeds_settings_become_ours(deepspeed):
    migration = read_deepspeed([str(deepspeed)])
    config = migration.config()
    assert (config.strategy, config.global_batch_size, config.micro_batch_size) == ("zero3", 8, 2)
    assert (config.lr, config.beta1, config.beta2, config.grad_clip) == (3e-4, 0.9, 0.98, 0.5)
    assert (config.warmup_steps, config.max_steps, config.min_lr) == (1, 4, 0.0)
    assert (config.loss_scale, config.loss_scale_interval, config.dtype) == (4096.0, 500, "float32")
    fates = {key: row.fate for key, row in rows(migration).items()}
    assert fates["zero_optimization.offload_optimizer.device"] == "ignored"
    assert fates["optimizer.params.weight_decay"] == "ignored"
    assert fates["scheduler.type"] == "changed"
    assert fates["gradient_accumulation_steps"] == "mapped"
    assert all(row.why for row in migration.rows if row.fate != "mapped")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"zero_hpz_partition_size": 8}, {"node_copy": 8}),
        ({"zero_hpz_partition_size": 1}, {}),
        ({"mics_shard_size": 4}, {"shard_size": 4}),
        ({"mics_shard_size": -1}, {}),  # DeepSpeed's default
        ({"zero_quantized_weights": True}, {"wire": {"weights": "int8"}}),
        ({"zero_quantized_gradients": True}, {"wire": {"grads": "int4"}}),
        ({"zero_quantized_weights": False, "zero_quantized_gradients": False}, {}),
    ],
    ids=str,
)
def test_what_zero_plus_plus_sends_and_keeps_is_ours_too(theirs, ours, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, **theirs}}))
    migration = read_deepspeed([str(tmp_path / "ds.json")])
    migration.config()
    set_anyway = {"dtype": "float32", "strategy": "zero3", "warmup_steps": 0}
    assert migration.values == set_anyway | ours


@pytest.mark.parametrize(
    ("stage", "key"), [(2, "zero_hpz_partition_size"), (0, "zero_quantized_weights"), (0, "zero_quantized_gradients")]
)
def test_what_a_stage_has_no_use_for_is_ignored(stage, key, tmp_path):
    value = 8 if key.endswith("size") else True
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage, key: value}}))
    migration = read_deepspeed([str(tmp_path / "ds.json")])
    assert migration.config().strategy == f"zero{stage}"
    assert rows(migration)[f"zero_optimization.{key}"].fate == "ignored"


def test_a_configuration_of_deepspeed_trains(deepspeed, tmp_path, capsys):
    assert run_import_config(["deepspeed", str(deepspeed)]) == 0
    values = tomllib.loads(capsys.readouterr().out)
    values |= {"out": str(tmp_path / "run"), "seq_len": 16, "device": "cpu", "eval_batches": 2}
    values["model"] = {"name": "gpt2-demo", "n_layer": 2, "n_embd": 16, "n_head": 2}
    values["data"] = {"source": "synthetic", "dir": str(tmp_path / "tokens")}
    assert run_training(TrainConfig.model_validate(values)) == 0


def test_an_optimizer_that_the_trainer_has_not_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "Lion"}}))
    with pytest.raises(UserError, match=r"optimizer\.type: Lion is not in the trainer"):
        read_deepspeed([str(tmp_path / "ds.json")])


def converted(tmp_path, **theirs):
    (tmp_path / "ds.json").write_text(json.dumps(theirs))
    migration = read_deepspeed([str(tmp_path / "ds.json")])
    assert all(row.why for row in migration.rows if row.fate != "mapped")
    return migration


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [("AdamW", {}, 0.0), ("adamw", {"torch_adam": True}, 0.01), ("Adam", {}, 0.0), ("Adam", {"torch_adam": True}, 0.0)],
)
def test_what_the_file_leaves_out_has_deepspeeds_defaults(tmp_path, kind, params, decay):
    migration = converted(tmp_path, optimizer={"type": kind, "params": params})
    values = tomllib.loads(migration.text())
    expected = {"lr": 1e-3, "min_lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": decay, "grad_clip": 1.0}
    assert {key: values[key] for key in expected} == expected  # in the file, whatever our defaults are
    assert (values["strategy"], values["warmup_steps"], values["dtype"]) == ("zero0", 0, "float32")
    told = {key: row.why for key, row in rows(migration).items() if row.fate == "default"}
    assert {"optimizer.params.betas", "optimizer.params.weight_decay", "gradient_clipping"} < told.keys()
    assert "in earlier ones 0" in told["gradient_clipping"]


@pytest.mark.parametrize(
    ("scheduler", "params", "rates"),
    [
        ("WarmupLR", {}, (1e-3, 1e-3, 1000)),  # it sets its own rate, up to its own default
        ("WarmupLR", {"warmup_max_lr": 5e-4, "warmup_num_steps": 3}, (5e-4, 5e-4, 3)),
        ("WarmupLR", {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}, (1e-3, 1e-3, None)),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}, (1e-3, 0.0, 3)),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3}, (3e-4, 3e-8, 3)),
        ("WarmupCosineLR", {"cos_min_ratio": 0.5, "warmup_num_steps": 3}, (3e-4, 1.5e-4, 3)),
        ("OneCycle", {"cycle_max_lr": 0.1}, (3e-4, 3e-4, 0)),
    ],
)
def test_rates_are_those_of_deepspeeds_schedulers(tmp_path, scheduler, params, rates):
    migration = converted(
        tmp_path, optimizer={"type": "AdamW", "params": {"lr": 3e-4}}, scheduler={"type": scheduler, "params": params}
    )
    values = migration.values
    assert (values["lr"], values["min_lr"], values.get("warmup_steps")) == (*map(pytest.approx, rates[:2]), rates[2])
    migration.config()
    if scheduler.startswith("Warmup"):
        assert rows(migration)["scheduler.params.warmup_type"].why == "logarithmic there, linear here"
    linear = {"type": "WarmupLR", "params": {"warmup_type": "linear"}}
    assert rows(converted(tmp_path, scheduler=linear))["scheduler.params.warmup_type"].fate == "mapped"


@pytest.mark.parametrize("key", ["bf16", "fp16", "bfloat16"])
def test_auto_is_our_default_as_the_table_says(tmp_path, key):
    assert converted(tmp_path, **{key: {"enabled": "auto"}}).config().dtype == TrainConfig().dtype
    assert converted(tmp_path, **{key: {"enabled": False}}).config().dtype == "float32"
    both = {key: {"enabled": "auto"}, "bf16": {"enabled": True}}
    assert converted(tmp_path, **both).config().dtype == "bfloat16"
    half = converted(tmp_path, fp16={"enabled": True}).config()
    assert (half.dtype, half.loss_scale, half.loss_scale_interval) == ("float16", 65536.0, 1000)


def test_what_is_ignored_is_said_on_the_console_too(deepspeed, capsys, shakespeare):
    run_import_config(["deepspeed", str(deepspeed)])
    out, err = capsys.readouterr()
    assert "ignored: zero_optimization.offload_optimizer.device (states stay on the device; more ranks hold" in err
    assert all(line.startswith("ignored: ") for line in err.splitlines())
    tomllib.loads(out)
    run_import_config(["nanogpt", str(shakespeare)])
    assert capsys.readouterr().err == "ignored: wandb_run_name (line 10 is no constant)\n"


def test_a_list_is_no_configuration(tmp_path):
    (tmp_path / "ds.json").write_text("[]")
    with pytest.raises(UserError, match="is not a JSON object"):
        read_deepspeed([str(tmp_path / "ds.json")])


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("batch_size", {"gradient_accumulation_steps"}),
        ("eval_interval", {"always_save_checkpoint"}),
        ("max_iters", {"warmup_iters", "lr_decay_iters"}),
        ("decay_lr", {"warmup_iters", "lr_decay_iters", "min_lr"}),
    ],
)
def test_a_setting_that_goes_with_one_that_is_no_constant_is_told_and_left_out(tmp_path, name, others):
    (tmp_path / "a.py").write_text(f"{name} = int(os.environ['X'])\n")
    migration = read_nanogpt([str(tmp_path / "a.py")])
    told = {key for key, row in rows(migration).items() if row.why == f"it goes with {name}, which is no constant"}
    assert told == others
    assert rows(migration)[name].why == "line 1 is no constant"
    migration.config()


def test_a_rate_that_is_no_constant_is_missed_where_it_would_be_the_least_one_too(tmp_path):
    (tmp_path / "a.py").write_text("decay_lr = False\nlearning_rate = float(os.environ['X'])\n")
    found = rows(read_nanogpt([str(tmp_path / "a.py")]))
    assert found["decay_lr"].why == "it goes with learning_rate, which is no constant"


@pytest.mark.parametrize("words", [[], ["--dtype=bfloat16"], ["--dtype=float16"]])
def test_on_a_cpu_nanogpt_computes_in_float32_whatever_dtype_says(words):
    assert read_nanogpt(["--device=cpu", *words]).values["dtype"] == "float32"
    assert read_nanogpt(["--device=cuda", *words]).values["dtype"] == (words or ["bfloat16"])[0].removeprefix(
        "--dtype="
    )


def test_a_character_level_set_keeps_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "shakespeare_char"
    folder.mkdir(parents=True)
    stoi = {"\n": 0, "a": 1}
    (folder / "meta.pkl").write_bytes(pickle.dumps({"stoi": stoi, "itos": {0: "\n", 1: "a"}, "vocab_size": 2}))
    values = read_nanogpt(["--dataset=shakespeare_char"]).values
    tokenizer = "json:data/shakespeare_char/meta.pkl"
    assert values["data"] == {"source": "bin", "path": ["data/shakespeare_char"], "tokenizer": tokenizer}
    assert "vocab_size" not in values["model"]
