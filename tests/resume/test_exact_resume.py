"""A run that was interrupted ends in the same bits as one that was not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exactness import same_bits
from same_results import contents
from soak import soaking
from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.train.loop.loop import train
from zeroshard.train.setup.build import build_run

CPU = torch.device("cpu")


def _train(config, world_size=1, until=None):
    """Train to the end, or as far as a run gets that is killed after `until` steps; weights and metrics by step."""

    def rank_main(comm):
        run = build_run(config, comm, CPU)
        if until is not None:  # the learning rate stays that of the whole run
            run = replace(run, schedule=replace(run.schedule, max_steps=until))
        train(run)
        run.close()
        return run.strategy.state_dict()

    if world_size == 1:
        weights = rank_main(LocalCommunicator())
    else:
        weights = run_threads(rank_main, world_size)[0]
    steps = {}
    for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            steps[event["step"]] = (event["loss"], event["grad_norm"], event["lr"])
    return weights, steps


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("ddp", 1),
        ("zero0", 2),
        ("zero1", 1),
        ("zero2", 2),
        pytest.param("zero3", 1, marks=pytest.mark.soak),
        ("zero3", 2),
    ],
)
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(tiny_config, tmp_path, strategy, world_size):
    options = {"strategy": strategy, "grad_accum_steps": 2, "eval_interval": 0}
    if world_size == 1:
        options["model"] = {"name": "gpt2-demo", "n_layer": 2, "n_embd": 16, "n_head": 2, "dropout": 0.2}
    whole_weights, whole = _train(tiny_config(**options, out=str(tmp_path / "whole")), world_size)
    parts = str(tmp_path / "parts")
    _train(tiny_config(**options, out=parts), world_size, until=3)
    resumed_weights, resumed = _train(tiny_config(**options, out=parts, resume="auto"), world_size)
    assert resumed == whole
    assert list(resumed) == [1, 2, 3, 4, 5, 6]
    assert same_bits(resumed_weights, whole_weights)


@pytest.mark.parametrize("shard_size", [2, *(pytest.param(size, marks=pytest.mark.soak) for size in (1, 4))])
def test_so_is_one_whose_groups_of_ranks_are_replicas(tiny_config, tmp_path, shard_size):
    options = {"shard_size": shard_size, "grad_accum_steps": 2}
    parts = str(tmp_path / "parts")
    _train(tiny_config(**options, strategy="zero3", out=parts), 4, until=3)
    _, manifest = checkpoint.open_manifest(checkpoint.latest(Path(parts) / "checkpoints"))
    written = {piece.file for entry in manifest.tensors for piece in entry.pieces}
    assert written == {f"rank-{rank:05d}-of-00004.safetensors" for rank in range(shard_size)}
    resumed_weights, resumed = _train(tiny_config(**options, strategy="zero3", out=parts, resume="auto"), 4)
    for strategy in ("zero2", "zero3") if soaking() else ("zero2",):
        whole_weights, whole = _train(tiny_config(**options, strategy=strategy, out=str(tmp_path / strategy)), 4)
        assert resumed == whole
        assert same_bits(resumed_weights, whole_weights)


@pytest.mark.parametrize(
    ("saved", "loaded"), [(("zero1", 3), ("ddp", 1)), (("zero3", 4, 2), ("zero1", 3)), (("zero1", 2), ("zero2", 4, 2))]
)
def test_state_saved_by_one_strategy_and_world_is_loaded_by_another_to_the_bit(tiny_config, tmp_path, saved, loaded):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    (strategy, world_size, *shard_size), (next_strategy, next_world_size, *next_shard_size) = saved, loaded
    config = tiny_config(strategy=strategy, shard_size=sum(shard_size), out=first, max_steps=3)
    weights, _ = _train(config, world_size)
    path = Path(first) / "checkpoints" / "step-00000003"

    def rank_main(comm):
        config = tiny_config(
            strategy=next_strategy, shard_size=sum(next_shard_size), out=second, max_steps=3, resume=str(path)
        )
        run = build_run(config, comm, CPU)
        assert run.first_step == 3
        again = Path(second) / "again"
        checkpoint.save(again, run.strategy, step=3)
        run.close()
        return run.strategy.state_dict()

    for state in run_threads(rank_main, next_world_size):
        assert same_bits(state, weights)
    before, after = contents(path), contents(Path(second) / "again")
    assert {kind for _, kind in before} == {"param", "exp_avg", "exp_avg_sq", "step"}
    assert same_bits(before, after)
