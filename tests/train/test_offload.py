"""Runs with state off the device: the same bits as without, held to their plan, and refused where nonsense."""

from __future__ import annotations

import errno
import gc
import re
import signal
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forked
from tiny_runs import train_on
from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host import host_memory
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.host.finalizers import settle
from zeroshard.lab.planner.run_plan import predict
from zeroshard.lab.predict.hardware import Calibration, Device, Link, write_calibration
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig, merge
from zeroshard.train.setup import offloading
from zeroshard.train.start import run_training
from zeroshard.zero import Offload
from zeroshard.zero.offload import disk
from zeroshard.zero.offload.placement import HostGroup


def _config(words):
    return validate(TrainConfig, merge({}, read_flags(words.split(), flags_of(TrainConfig))))


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


ONLY_SOAK = {"zero1, disk", "zero3, all on disk, bfloat16", "zero3, bfloat16"}


@pytest.mark.redundant(but=["zero3, reproducible"])
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.soak] * (way in ONLY_SOAK)) for way in WAYS])
def test_a_run_has_the_bits_of_one_without_and_keeps_to_its_plan(tiny_config, way):
    strategy, offload, given = WAYS[way]
    given = {"strategy": strategy, "eval_interval": 0, "max_steps": 3, "plan": {"enforce": True}, **given}
    config = tiny_config(**given)
    away = tiny_config(**given, offload=offload, out=f"{config.out}-away")
    here = run_threads(lambda comm: _trained(comm, config), 2)
    for (_, state, _), (status, there, contract) in zip(
        here, run_threads(lambda comm: _trained(comm, away), 2), strict=True
    ):
        assert (status, contract.difference, contract.num_checked) == (ExitStatus.OK, "", 2)
        assert contract.memory_bytes["host_optimizer"] > 0
        on_disk = sum(n for name, n in contract.memory_bytes.items() if name.startswith("disk_"))
        assert (on_disk > 0) == ("disk" in offload["state"])
        assert on_disk <= contract.planned.file_bytes
        assert all(torch.equal(state[name], there[name]) for name in state)


@pytest.mark.redundant
@pytest.mark.pairwise("state")
@pytest.mark.parametrize("lora", [2, 0])
@pytest.mark.parametrize("state", ["all", "disk-all"])
def test_one_rank_streams_its_weights_keeps_to_its_plan_and_is_resumed(tiny_config, state, lora):
    given = {"strategy": "zero3", "eval_interval": 2, "max_steps": 4, "plan": {"enforce": True}, "dtype": "bfloat16"}
    given |= {"lora": {"rank": lora}} if lora else {}
    config = tiny_config(**given)
    away = {"offload": {"state": state}, "out": f"{config.out}-away"}
    _, plain, _ = _trained(LocalCommunicator(), config)
    parts = _trained(LocalCommunicator(), tiny_config(**given, **away), until=2)
    assert parts[2].memory_bytes["params"] == 0
    _, found, contract = _trained(LocalCommunicator(), tiny_config(**given, **away, resume="auto"))
    assert (contract.difference, contract.memory_bytes["params"]) == ("", 0)
    assert all(torch.equal(plain[name], found[name]) for name in plain)


@pytest.mark.redundant
@pytest.mark.parametrize(("first", "then"), [("optimizer", "none"), ("disk", "none"), ("none", "disk")])
def test_what_is_resumed_with_state_elsewhere_has_the_same_bits(tiny_config, first, then):
    given = {"eval_interval": 0, "max_steps": 4}
    config = tiny_config(**given)
    parts = tiny_config(**given, offload=first, out=f"{config.out}-parts")
    whole = run_threads(lambda comm: _trained(comm, config), 2)
    run_threads(lambda comm: _trained(comm, parts, until=2), 2)
    rest = tiny_config(**given, offload=then, resume="auto", strategy="zero3", out=parts.out)
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


# Two ranks as threads of a process, which is killed after so many of their updates: in a step, between two units.
KILLED = f"""
import os, signal, sys
sys.path.append({str(Path(forked.__file__).parent)!r})
from tiny_runs import train_on
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.train.config.config import TrainConfig
from zeroshard.zero.offload.executor import Executor

config, num_updates, run, done = TrainConfig.model_validate_json(sys.argv[1]), int(sys.argv[2]), Executor._run, []

def run_or_die(executor, update, job):
    run(executor, update, job)
    done.append(update)
    if len(done) == num_updates:
        os.kill(os.getpid(), signal.SIGKILL)

Executor._run = run_or_die
run_threads(lambda comm: train_on(comm, config), 2)
"""


@pytest.mark.parametrize(
    ("offload", "num_updates"),
    [("disk", 3 * 8 + 3), pytest.param("optimizer", 3 * 6 + 3, marks=pytest.mark.soak)],
)
def test_a_run_that_is_killed_between_two_updates_is_resumed_with_the_bits_of_one_that_is_not(
    tiny_config, tmp_path, capfd, offload, num_updates
):
    given = {"offload": offload, "eval_interval": 0, "checkpoint_interval": 2, "checkpoint_async": False}
    given["max_steps"] = 4
    config = tiny_config(**given)
    whole = run_threads(lambda comm: _trained(comm, tiny_config(**given, out=f"{config.out}-whole")), 2)
    ended = forked.run([sys.executable, "-c", KILLED, config.model_dump_json(), str(num_updates)], check=False)
    assert ended.returncode == -signal.SIGKILL
    folder = Path(config.out, "offload")
    assert len(list(folder.glob("rank-*.states"))) == 2 * (offload == "disk")
    (folder / "rank-00007.states").write_bytes(bytes(4096)) if offload == "disk" else None  # of more ranks than now
    resumed = tiny_config(**given, resume="auto")
    capfd.readouterr()
    parts = run_threads(lambda comm: _trained(comm, resumed), 2)
    for (_, state, _), (status, found, _) in zip(whole, parts, strict=True):
        assert status == ExitStatus.OK
        assert all(torch.equal(state[name], found[name]) for name in state)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: offload.path")]
    assert bool(said) == (offload == "disk")
    files = r"(the file|\d files) of a run that was killed \([\d,]+ bytes\): a run resumes from its checkpoint; removed"
    line = rf"warning: offload.path: {folder} had {files}"
    assert all(re.fullmatch(line, each) for each in said)
    gc.collect()
    settle()
    assert not folder.exists()
    assert not Path(f"{config.out}-whole", "offload").exists()


def refused_on_all(config):
    """The one line by which both ranks refuse a run."""

    def on_rank(comm):
        with pytest.raises(UserError) as said:
            train_on(comm, config, predict=predict)
        return str(said.value)

    first, second = run_threads(on_rank, 2)
    assert first == second
    return first


def test_files_that_the_disk_has_no_room_for_are_refused_before_anything_is_built(tiny_config, monkeypatch, tmp_path):
    config = tiny_config(offload={"state": "disk", "path": str(tmp_path / "not yet" / "there")})
    disk = offloading.os.statvfs(tmp_path)
    asked = []

    def statvfs(path):
        asked.append(path)
        return type("Disk", (), {"f_bavail": 10, "f_frsize": disk.f_frsize})

    monkeypatch.setattr(offloading.os, "statvfs", statvfs)

    line = refused_on_all(config)
    assert re.fullmatch(
        r"offload.path: 2 ranks keep 0\.\d\d GiB in files of \S+/not yet/there, whose disk has 0\.00 GiB free; "
        r"free space, or name a folder on another disk",
        line,
    )
    assert set(asked) == {tmp_path}
    assert not Path(config.out, "config.toml").exists()


@pytest.mark.redundant
def test_a_leading_tilde_is_the_users_home(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = tiny_config(offload={"state": "disk", "path": "~/states"}, max_steps=2, eval_interval=0)
    assert (
        config.offload.folder(Path("x"))
        == tmp_path / "home" / "states"
        == Offload("disk", "disk", path="~/states").folder
    )
    assert train_on(LocalCommunicator(), config, predict=predict)[0] == ExitStatus.OK
    gc.collect()
    settle()
    assert not (tmp_path / "home" / "states").exists()


@pytest.mark.redundant
def test_a_disk_that_fails_in_a_step_ends_the_run_as_storage_that_fails(tiny_config, monkeypatch, capsys):
    config, write, written = tiny_config(offload="disk", eval_interval=0), disk.os.pwritev, []

    def pwritev(*given):
        written.append(given)
        if len(written) > 20:
            raise OSError(errno.EIO, "Input/output error")
        return write(*given)

    monkeypatch.setattr(disk.os, "pwritev", pwritev)
    assert run_training(config) == ExitStatus.STORAGE
    last = capsys.readouterr().err.splitlines()[-1]
    file, number = r"'.*rank-00000.states'", rf"\[Errno {errno.EIO}\]"
    # by whoever touches the unit first: the executor, or the checkpoint
    why = rf"(step: the update of unit \S+ failed: OSError: {number} )?Input/output error(: {file}; .*)?"
    todo = "see that it is there and may be written, then start again with --resume auto"
    assert re.fullmatch(rf"error: {config.out}: {number} {why}: {file}; {todo}", last), last


@pytest.mark.redundant
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


@pytest.mark.redundant(but=["slow", "fast"])
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

    line = refused_on_all(config)
    assert re.fullmatch(
        r"offload.state: 2 ranks keep 0\.\d\d GiB in memory of \S+, which has 0\.00 GiB; give a smaller "
        r"--offload.fraction, use more machines, or fewer ranks",
        line,
    )
    assert not Path(config.out, "config.toml").exists()
    train_on_one = tiny_config(offload="optimizer", out=f"{config.out}-more")
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 2 << 30)
    assert run_threads(lambda comm: train_on(comm, train_on_one, until=1, predict=predict)[0], 2) == [0, 0]
