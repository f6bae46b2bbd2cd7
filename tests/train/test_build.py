from pathlib import Path

import pytest
import torch

from tiny_runs import built, events_of
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.kernels import dispatch
from zeroshard.kernels.launch import INTERPRETED
from zeroshard.models import GPT2
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import load_config
from zeroshard.train.setup.assemble import make_model
from zeroshard.train.setup.numerics import choose_device, with_dtype
from zeroshard.train.start import run_training

CPU = torch.device("cpu")


def _refusal(config, world_size=1):
    """The one line that every rank refuses a configuration with."""

    def rank_main(comm):
        with pytest.raises(UserError) as caught:
            built(config, comm)
        return str(caught.value)

    (line,) = set(run_threads(rank_main, world_size))
    assert "\n" not in line
    return line


def test_the_run_folder_says_how_to_start_the_run_again(tiny_config):
    config = tiny_config(dtype="auto")
    run = built(config)
    # What the device decided is written down: the run goes on in it on any other.
    assert load_config(run.folder / "config.toml") == config.model_copy(update={"dtype": "float32", "compile": "off"})
    assert (run.folder / "tokenizer" / "meta.json").is_file()


def test_what_the_engine_and_the_optimizer_are_told_reaches_them(tiny_config):
    optim = {"decay": "wsd", "decay_share": 0.25, "eps": 1e-6}
    settings = {"prefetch": 3, "accumulate": "local", "reduce_dtype": "bfloat16", "optim": optim}
    config = tiny_config(strategy="zero3", max_steps=8, warmup_steps=0, lr=1.0, min_lr=0.0, **settings)
    run = built(config)
    zero = run.strategy.zero
    assert zero.accumulate == "local"
    assert zero.precision.reduce_dtype is torch.bfloat16
    assert zero._runtime.prefetch == 3
    assert {group["eps"] for group in run.strategy.optimizer.param_groups} == {1e-6}
    assert [run.learning_rate(step) for step in range(9)] == [1.0] * 7 + [0.5, 0.0]


def test_tf32_is_refused_where_there_is_none(tiny_config):
    assert _refusal(tiny_config(tf32=True)) == "tf32: the device is cpu, and GPUs alone have TF32; leave it out"


def test_the_compute_type_is_bfloat16_on_a_gpu_that_has_it(monkeypatch):
    gpu = torch.device("cuda", 0)
    for has_it, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has_it=has_it: has_it)
        assert with_dtype(TrainConfig(), gpu).dtype == dtype
        assert with_dtype(TrainConfig(dtype="float16"), gpu).dtype == "float16"
    assert with_dtype(TrainConfig(), CPU).dtype == "float32"


def test_a_folder_that_holds_a_run_is_left_alone_unless_it_is_resumed(tiny_config):
    config = tiny_config(max_steps=2)
    run_training(config)
    log = (Path(config.out) / "metrics.jsonl").read_bytes()
    assert _refusal(config, 2).startswith(f"out: {config.out} already holds a run; ")
    assert (Path(config.out) / "metrics.jsonl").read_bytes() == log
    run = built(config.model_copy(update={"resume": "auto"}))
    assert run.first_step == 2


def test_sequences_longer_than_the_models_are_refused_before_anything_is_made(tiny_config, tmp_path):
    config = tiny_config(seq_len=129)
    assert _refusal(config).startswith("seq_len: 129 is above the 128 of gpt2-demo; ")
    assert not Path(config.out).exists()


@pytest.mark.redundant
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_corpus_shorter_than_one_batch_is_refused_and_leaves_no_run(tiny_config, world_size):
    config = tiny_config(micro_batch_size=500)
    line = _refusal(config, world_size)
    assert line.startswith("data: the train split has ")
    assert f"needs {500 * world_size:,} rows" in line
    assert not (Path(config.out) / "config.toml").exists()
    built(config.model_copy(update={"micro_batch_size": 2}))


def test_data_that_cannot_be_prepared_is_the_same_refusal_on_every_rank(tiny_config, tmp_path):
    data = {"source": "text", "path": (str(tmp_path / "missing.txt"),), "dir": str(tmp_path / "tokens")}
    assert "missing.txt" in _refusal(tiny_config(data=data), 2)


def test_resuming_from_what_is_no_checkpoint_is_refused(tiny_config, tmp_path):
    line = _refusal(tiny_config(resume=str(tmp_path / "nowhere")), 2)
    what = "is not a complete checkpoint: there is no such folder; name another one"
    assert line == f"resume: {tmp_path / 'nowhere'} {what}"


@pytest.mark.redundant
def test_a_run_folder_in_place_of_a_checkpoint_is_told_its_newest(tiny_config, tmp_path):
    config = tiny_config(max_steps=2)
    run_training(config)
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    line = _refusal(config.model_copy(update={"resume": config.out}))
    assert line == f"resume: {config.out} is not a complete checkpoint: no manifest.json; name {newest}"


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    assert choose_device("cpu", 5) == CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", 5) == CPU
    with pytest.raises(UserError, match="device: rank 0 of this machine finds 0 CUDA devices"):
        choose_device("cuda", 0)


def test_kernels_that_cannot_be_had_are_refused_before_anything_is_made(tiny_config, monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    config = tiny_config(kernels="triton")
    assert _refusal(config).startswith("kernels: triton was asked for and")
    assert not Path(config.out).exists()


@pytest.mark.redundant
def test_the_log_names_who_serves_each_operation(tiny_config):
    config = tiny_config(max_steps=1, warmup_steps=0, fused=False)
    assert run_training(config) == 0
    (start,) = events_of(config.out, "start")
    assert start["kernels"] == {"LayerNorm": "reference", "LinearCrossEntropy": "reference", "AdamW": "torch"}


@pytest.mark.redundant
@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("strategy", ["zero2", pytest.param("ddp", marks=pytest.mark.soak)])
def test_a_run_on_our_kernels_gives_the_losses_of_one_without(strategy, tiny_config, tmp_path):
    """And a checkpoint that either goes on from."""
    losses = {}
    for kernels in ("triton", "reference"):
        model = {"name": "llama-tiny", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_kv_head": 1}
        config = tiny_config(
            kernels=kernels,
            model=model,
            strategy=strategy,
            seq_len=4,
            max_steps=2,
            eval_interval=0,
            eval_batches=1,
            out=str(tmp_path / kernels),
        )
        assert run_training(config) == 0
        lines = events_of(tmp_path / kernels)
        losses[kernels] = [line["loss"] for line in lines if line["event"] in ("step", "eval")]
        served = set(lines[0]["kernels"].values())
        assert served == {kernels, "torch fused"}
    assert losses["triton"] == pytest.approx(losses["reference"], rel=1e-4)
    further = config.model_copy(update={"max_steps": 3, "resume": str(tmp_path / "triton/checkpoints/step-00000002")})
    assert run_training(further.model_copy(update={"out": str(tmp_path / "further")})) == 0


def test_more_ranks_than_the_global_batch_feeds_are_refused(tiny_config):
    line = _refusal(tiny_config(global_batch_size=1, micro_batch_size=1), world_size=2)
    assert line == "global_batch_size: 1 sequences cannot feed 2 ranks; use at least 2, or fewer ranks"
    line = _refusal(tiny_config(global_batch_size=6, micro_batch_size=2), world_size=2)
    assert line.startswith("global_batch_size: 6 is no multiple of 2 (micro_batch_size) x 2 ranks")


def test_a_shard_size_that_does_not_share_out_the_world_is_refused(tiny_config):
    line = _refusal(tiny_config(shard_size=4), world_size=2)
    assert line == "shard_size: groups of 4 ranks do not partition a world of 2; choose one of 1, 2"
    assert not Path(tiny_config().out).exists()


@pytest.mark.redundant(but=["1"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_global_batch_is_the_same_number_of_rows_at_any_world_size(tiny_config, world_size):
    config = tiny_config(global_batch_size=8, micro_batch_size=2)

    def rank_main(comm):
        run = built(config.model_copy(update={"out": f"{config.out}-{comm.rank}"}), comm)
        return run.tokens_per_step, run.schedule.grad_accum_steps

    for tokens_per_step, steps in run_threads(rank_main, world_size):
        assert tokens_per_step == 8 * config.seq_len
        assert steps == 4 // world_size


@pytest.mark.parametrize("preset", [{"name": "gpt2-demo"}, {"name": "llama-tiny", "n_kv_head": 2}], ids=str)
def test_the_training_loss_is_smoothed_and_the_validation_loss_is_not(tiny_config, preset):
    optim = {"label_smoothing": 0.1, "z_loss": 1e-2}
    sizes = {**preset, "n_layer": 1, "n_embd": 16, "n_head": 2}
    model = make_model(tiny_config(model=sizes, optim=optim), 32, "cpu")
    tokens = torch.arange(8)[None]
    targets = torch.tensor([[1, 2, 3, 4, -100, 6, 7, 8]])
    logits, flat = model(tokens)[0], targets[0]
    plain = torch.nn.functional.cross_entropy(logits, flat)
    smoothed = torch.nn.functional.cross_entropy(logits, flat, label_smoothing=0.1)
    smoothed += 1e-2 * logits[flat != -100].logsumexp(-1).square().mean()
    torch.testing.assert_close(model.train()(tokens, targets), smoothed)
    torch.testing.assert_close(model.eval()(tokens, targets), plain)


def test_a_model_with_a_loss_of_its_own_is_not_smoothed(tiny_config, monkeypatch):
    monkeypatch.setattr(GPT2, "takes_loss_options", False)
    with pytest.raises(UserError, match=r"^optim\.z_loss: a GPT2 computes a loss of its own; leave it out"):
        make_model(tiny_config(optim={"z_loss": 1e-4}), 32, "meta")
