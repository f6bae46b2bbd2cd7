"""Runs with state off the device: the same bits as without, held to their plan, and refused where nonsense."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_runs import train_on
from zeroshard import host_memory
from zeroshard.comm import run_threads
from zeroshard.errors import ExitStatus, UserError
from zeroshard.flags import flags_of, read_flags
from zeroshard.lab.planner.run_plan import predict
from zeroshard.lab.predict.hardware import Calibration, Device, Link, write_calibration
from zeroshard.train.config.config import TrainConfig, merge
from zeroshard.train.config.sections import SHORTHANDS
from zeroshard.train.config.validate import validate
from zeroshard.zero import Offload
from zeroshard.zero.offload.placement import HostGroup


def _config(words):
    return validate(TrainConfig, merge({}, read_flags(words.split(), flags_of(TrainConfig, SHORTHANDS))))


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
    "zero1, disk": ("zero1", {"state": "disk"}, {"grad_accum_steps": 2}),
    "zero3, disk, bfloat16": ("zero3", {"state": "disk"}, {"dtype": "bfloat16"}),
    "zero1, all on disk": ("zero1", {"state": "disk-all"}, {"grad_accum_steps": 2, "grad_clip": 0.05}),
    "zero3, all on disk, bfloat16": ("zero3", {"state": "disk-all"}, {"dtype": "bfloat16", "grad_accum_steps": 2}),
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
        on_disk = sum(n for name, n in contract.memory_bytes.items() if name.startswith("disk_"))
        assert (on_disk > 0) == ("disk" in offload["state"])
        assert on_disk <= contract.planned.file_bytes
        assert all(torch.equal(state[name], there[name]) for name in state)


@pytest.mark.parametrize(("first", "then"), [("optimizer", "none"), ("disk", "none"), ("none", "disk")])
def test_what_is_resumed_with_state_elsewhere_has_the_same_bits(tiny_config, first, then):
    config = tiny_config(eval_interval=0)
    parts = tiny_config(eval_interval=0, offload=first, out=f"{config.out}-parts")
    whole = run_threads(lambda comm: _trained(comm, config), 2)
    run_threads(lambda comm: _trained(comm, parts, until=3), 2)
    rest = tiny_config(eval_interval=0, offload=then, resume="auto", strategy="zero3", out=parts.out)
    for (_, state, _), (_, found, _) in zip(whole, run_threads(lambda comm: _trained(comm, rest), 2), strict=True):
        assert all(torch.equal(state[name], found[name]) for name in state)


def test_a_folder_that_cannot_have_the_files_is_refused_on_every_rank_before_a_step(tiny_config, tmp_path):
    (tmp_path / "a file").touch()
    config = tiny_config(offload={"state": "disk", "path": str(tmp_path / "a file")})

    def refused(comm):
        with pytest.raises(UserError) as said:
            train_on(comm, config, predict=predict)
        return str(said.value)

    lines = run_threads(refused, 2)
    what = f"{tmp_path / 'a file'}: File exists; name a folder on a local disk that can be written"
    assert lines == [f"offload.path: {what}"] * 2


def test_a_run_that_holds_other_bytes_than_planned_is_stopped(tiny_config):
    config = tiny_config(plan={"enforce": True}, eval_interval=0, max_steps=3, offload="optimizer")

    def planner(job):
        return replace(predict(job), memory_bytes=predict(replace(job, offload=None)).memory_bytes)

    for status, run in run_threads(lambda comm: train_on(comm, config, predict=planner), 2):
        assert status == ExitStatus.CHECK_FAILED
        assert "grads has 0 bytes resident, planned were 25,472" in run.contract.difference


# -- fraction = auto, and memory of the hosts -----------------------------------------------------------------------


def _measured_host(tmp_path, update_bytes_per_s):
    """A file of a device whose forward takes what its operations take, and whose host updates as fast as given."""
    device = Device("by hand", 1 << 34, {"float32": 1e8}, 1e8, "by hand", device_type="cpu")
    device = replace(device, update_bytes_per_s=update_bytes_per_s, bus_bytes_per_s=1e12)
    path = tmp_path / f"device-{update_bytes_per_s:g}.json"
    write_calibration(path, Calibration(device, Link("by hand", 0.0, 1e9, "by hand", 0.0, 1.0, num_ranks=2)))
    return str(path)


@pytest.mark.parametrize(
    ("update_bytes_per_s", "num_away"), [(1e3, 0), (1e8, 1), (1e12, 2), (None, 3)], ids=["slow", "even", "fast", "none"]
)
def test_auto_moves_what_no_step_waits_for_and_changes_no_bit(tiny_config, tmp_path, update_bytes_per_s, num_away):
    config = tiny_config(max_steps=3, eval_interval=0)
    path = _measured_host(tmp_path, update_bytes_per_s) if update_bytes_per_s else ""
    given = {"offload": "optimizer", "plan": {"device": path, "enforce": True}, "out": f"{config.out}-away"}
    away = tiny_config(max_steps=3, eval_interval=0, **given)
    here = run_threads(lambda comm: _trained(comm, config), 2)
    there = run_threads(lambda comm: _finished(comm, away), 2)
    for (_, state, _), (run, found) in zip(here, there, strict=True):
        placed = [isinstance(unit.groups[0], HostGroup) for unit in run.strategy.zero.units]
        assert placed == [False] * (3 - num_away) + [True] * num_away
        assert (run.contract.difference, run.contract.num_checked) == ("", 2)
        assert all(torch.equal(state[name], found[name]) for name in state)
        said = run.about["offload"]
        bits = "on the host: same bits as on the device"
        assert run.about.get("update", "") == (bits if num_away else "")
        sizes = [sum(group.params.layout.numel for group in unit.groups) for unit in run.strategy.zero.units]
    reasons = {
        0: "none (auto: a step would wait for the update of any unit, as measured, and all of it fits)",
        1: "auto: no step waits for the updates of the last 1 of 3 units, as measured)",
        2: "auto: no step waits for the updates of the last 2 of 3 units, as measured)",
        3: "(all, auto: no rates of this device are known; `zeroshard bench device` measures them for --plan.device)",
    }
    assert said.endswith(reasons[num_away])
    if num_away in (1, 2):  # the number that is said makes the same run
        number = said.partition("--offload.fraction ")[2].partition(",")[0]
        assert _config(f"--offload optimizer --offload.fraction {number}").offload.share == float(number)
        assert Offload(fraction=float(number)).units_away(sizes) == num_away


def _finished(comm, config):
    _, run = train_on(comm, config, predict=predict)
    return run, run.strategy.state_dict()


def test_what_the_hosts_have_not_is_refused_before_anything_is_built(tiny_config, monkeypatch):
    config = tiny_config(offload="optimizer")
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 200_000)

    def refused(comm):
        with pytest.raises(UserError) as said:
            train_on(comm, config, predict=predict)
        return str(said.value)

    lines = run_threads(refused, 2)
    assert lines[0] == lines[1]
    assert re.fullmatch(
        r"offload.state: 2 ranks keep 0\.\d\d GiB in memory of \S+, which has 0\.00 GiB; give a smaller "
        r"--offload.fraction, use more machines, or fewer ranks",
        lines[0],
    )
    assert not Path(config.out, "config.toml").exists()
    train_on_one = tiny_config(offload="optimizer", out=f"{config.out}-more")
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 2 << 30)
    assert run_threads(lambda comm: train_on(comm, train_on_one, until=1, predict=predict)[0], 2) == [0, 0]
