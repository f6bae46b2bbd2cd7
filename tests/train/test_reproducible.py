"""`--reproducible`: a run has the same bits on any number of ranks, and goes on at another one."""

import json
import sys

import pytest

import forked
from exactness import same_bits
from zeroshard import checkpoint
from zeroshard.host.errors import UserError
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.assemble import check_shard_size
from zeroshard.train.setup.schedule import accumulation_steps

SHAPE = ["--model.n-layer", "2", "--model.n-embd", "16", "--model.n-head", "2", "--seq-len", "16"]
STEPS = ["--max-steps", "6", "--warmup-steps", "2", "--eval-interval", "2", "--eval-batches", "5"]
SMALL = ["--model", "gpt2-demo", *SHAPE, *STEPS, "--micro-batch-size", "2", "--data", "synthetic"]
REPRODUCIBLE = ["--reproducible", "4", "--ema-decay", "0.9", "--model.dropout", "0.1"]


def _train(folder, nproc, strategy, *words):
    given = [
        *SMALL,
        *REPRODUCIBLE,
        "--data.dir",
        str(folder.parent / "data"),
        "--data.max-tokens",
        "6000",
        "--device",
        "cpu",
    ]
    ranks = ["--nproc", str(nproc), "--strategy", strategy, "--out", str(folder)]
    command = [sys.executable, "-m", "zeroshard", "train", *given, *ranks, *words]
    done = forked.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done


def _numbers(folder):
    """Of each step and evaluation, the last time that it was taken."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = ("loss", "grad_norm", "val_loss", "ema_loss", "lr")
    return {(e["event"], e["step"]): [e.get(kind) for kind in kinds] for e in events if e["event"] in ("step", "eval")}


def _state(folder):
    whole = checkpoint.consolidate(checkpoint.latest(folder / "checkpoints"))
    return whole["model"], whole["optimizer"]["state"]


@pytest.mark.parametrize(
    "words",
    [
        ("--dtype", "float16"),
        pytest.param(("--dtype", "float32"), marks=pytest.mark.soak),
        pytest.param(("--dtype", "float32", "--optimizer", "adamw8bit"), marks=pytest.mark.soak),
        pytest.param(("--optimizer", "flash-adamw", "--ema-decay", "0"), marks=pytest.mark.soak),
    ],
)
def test_a_run_that_goes_on_with_other_ranks_has_the_bits_of_one_rank(tmp_path, words):
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    _train(alone, 1, "zero0", *words)
    _train(moved, 4, "zero3", *words, "--max-steps", "3", "--decay-steps", "6")
    said = _train(moved, 2, "zero1", *words, "--resume", "auto", "--decay-steps", "6")
    changes = [line for line in said.stderr.splitlines() if " was " in line]
    assert changes == ["resume: max_steps was 3, now it is 6"]
    numbers = _numbers(moved)
    del numbers["eval", 3]  # at the end of its first part
    assert numbers == _numbers(alone)
    assert sum(event == "step" for event, _ in numbers) == 6
    for one, other in zip(_state(alone), _state(moved), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize(
    ("world_size", "given", "wanted"),
    [
        (1, {}, 8),
        (2, {}, 4),
        (8, {}, 1),
        (2, {"grad_accum_steps": 3}, 12),
        (8, {"grad_accum_steps": 3}, 3),
        (4, {"global_batch_size": 32}, 4),
    ],
)
def test_a_step_has_as_many_sequences_on_any_number_of_ranks(world_size, given, wanted):
    assert accumulation_steps(TrainConfig(reproducible=8, micro_batch_size=2, **given), world_size) == wanted


def test_a_batch_that_micro_batches_cannot_share_is_refused():
    config = TrainConfig(reproducible=8, micro_batch_size=2, global_batch_size=24)
    with pytest.raises(UserError, match=r"global_batch_size: 24 is no multiple of 2 \(micro_batch_size\) x 8"):
        accumulation_steps(config, 2)


def test_ranks_that_cannot_share_the_micro_batches_are_refused():
    config = TrainConfig(reproducible=4, micro_batch_size=2)
    with pytest.raises(UserError, match=r"reproducible: 4 micro-batches cannot be shared .* to 3 ranks; use 1, 2"):
        check_shard_size(config, 3)
