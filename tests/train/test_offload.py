"""Runs with state off the device: the same bits as without, held to their plan, and refused where nonsense."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
import torch

from tiny_runs import train_on
from zeroshard.comm import run_threads
from zeroshard.errors import ExitStatus, UserError
from zeroshard.flags import flags_of, read_flags
from zeroshard.lab.planner.run_plan import predict
from zeroshard.train.config.config import TrainConfig, merge
from zeroshard.train.config.sections import SHORTHANDS
from zeroshard.train.config.validate import validate

OURS = "zero0, zero1, zero2, zero3"
SHARE = "is no share of the elements; give auto, or a number above 0 and up to 1, or leave out --offload"
REFUSED = {
    "--offload cloud": "offload.state: 'cloud' is not a choice; choose one of none, optimizer, all, disk",
    "--offload.fraction 0.5": "offload.fraction: 0.5 is given, and offload is none: no state leaves the device; add "
    "--offload optimizer, or leave it out",
    "--offload optimizer --offload.fraction 0": f"offload.fraction: 0 {SHARE}",
    "--offload optimizer --offload.fraction nan": f"offload.fraction: nan {SHARE}",
    "--offload all --offload.pinned 4": "offload.pinned: '4' is not a size; write a number and a unit, as 5GB or "
    "512MiB",
    "--offload disk": "offload.state: disk is given, and the engine keeps optimizer states in memory of the device or "
    "of the host; use optimizer or all",
    "--offload optimizer --offload.path x": "offload.path: x is given, and offload = optimizer keeps state in memory; "
    "use --offload disk, or leave it out",
    "--offload optimizer --strategy ddp": "offload.state: optimizer is given, and ddp does not use zeroshard's engine; "
    f"leave it out, or use --strategy {OURS}",
    "--offload all --shard-size 1 --local-steps.every 2": "offload.state: all is given, and outer steps of "
    "local_steps.every read master weights on the device; leave one of the two out",
}


def _config(words):
    return validate(TrainConfig, merge({}, read_flags(words.split(), flags_of(TrainConfig, SHORTHANDS))))


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_kept_off_the_device_is_refused_in_one_line(words):
    with pytest.raises(UserError) as said:
        _config(words)
    assert str(said.value) == REFUSED[words]


def test_flags_and_a_file_say_the_same():
    words = "--offload optimizer --offload.fraction 0.5 --offload.pinned 4GiB"
    text = 'offload = {state = "optimizer", fraction = 0.5, pinned = "4GiB"}'
    found = _config(words).offload
    assert found == validate(TrainConfig, tomllib.loads(text)).offload
    assert (found.share, found.pinned_bytes) == (0.5, 4 * 2**30)
    short = merge({"offload": "optimizer"}, {"offload": {"pinned": "1GiB"}})
    assert short == {"offload": {"state": "optimizer", "pinned": "1GiB"}}
    assert not _config("--seq-len 64").offload.on


def _trained(comm, config, until=None):
    status, run = train_on(comm, config, until=until, predict=predict)
    return status, run.strategy.state_dict(), run.contract


WAYS = {
    "zero0": ("zero0", {"state": "optimizer"}, {}),
    "zero1, half": ("zero1", {"state": "optimizer", "fraction": 0.5}, {"grad_accum_steps": 2}),
    "zero2": ("zero2", {"state": "all"}, {"grad_clip": 0.05}),
    "zero3, bfloat16": ("zero3", {"state": "all"}, {"dtype": "bfloat16"}),
    "zero3, reproducible": ("zero3", {"state": "optimizer"}, {"reproducible": 4}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_has_the_bits_of_one_without_and_keeps_to_its_plan(tiny_config, way):
    strategy, offload, given = WAYS[way]
    given = {"strategy": strategy, "eval_interval": 0, "max_steps": 5, "plan": {"enforce": True}, **given}
    config = tiny_config(**given)
    away = tiny_config(**given, offload=offload, out=f"{config.out}-away")
    here = run_threads(lambda comm: _trained(comm, config), 2)
    for (_, state, _), (status, there, contract) in zip(
        here, run_threads(lambda comm: _trained(comm, away), 2), strict=True
    ):
        assert (status, contract.difference, contract.num_checked) == (ExitStatus.OK, "", 4)
        assert contract.memory_bytes["host_optimizer"] > 0
        assert all(torch.equal(state[name], there[name]) for name in state)


def test_what_is_resumed_with_all_state_on_the_device_has_the_same_bits(tiny_config):
    config = tiny_config(eval_interval=0)
    parts = tiny_config(eval_interval=0, offload="optimizer", out=f"{config.out}-parts")
    whole = run_threads(lambda comm: _trained(comm, config), 2)
    run_threads(lambda comm: _trained(comm, parts, until=3), 2)
    rest = config.model_copy(update={"resume": "auto", "strategy": "zero3", "out": parts.out})
    for (_, state, _), (_, then, _) in zip(whole, run_threads(lambda comm: _trained(comm, rest), 2), strict=True):
        assert all(torch.equal(state[name], then[name]) for name in state)


def test_a_run_that_holds_other_bytes_than_planned_is_stopped(tiny_config):
    config = tiny_config(plan={"enforce": True}, eval_interval=0, max_steps=3, offload="optimizer")

    def planner(job):
        return replace(predict(job), memory_bytes=predict(replace(job, offload=None)).memory_bytes)

    for status, run in run_threads(lambda comm: train_on(comm, config, predict=planner), 2):
        assert status == ExitStatus.CHECK_FAILED
        assert "grads has 0 bytes resident, planned were 25,472" in run.contract.difference
