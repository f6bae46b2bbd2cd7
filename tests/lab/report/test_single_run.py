"""The report of one run: its header, its curves over steps, and memory beside stage 0's."""

import json
import re

import pytest
import torch

from run_folders import write_case, write_run
from zeroshard.comm import run_threads
from zeroshard.lab.report.command import write_report
from zeroshard.lab.report.entries import gather
from zeroshard.lab.report.figures import figures_of
from zeroshard.lab.report.single_run import at_stage_zero, header_of
from zeroshard.lab.run_folders import read_run
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.loop import train
from zeroshard.train.records.origin import commit_of
from zeroshard.train.setup.build import build_run
from zeroshard.train.start import run_training

CURVES = {"loss", "lr", "grad-norm", "tokens", "step-time", "memory", "exposed"}
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d")


def test_the_report_of_a_run_has_its_curves_its_header_and_its_times(text_config):
    config = text_config(max_steps=6, eval_interval=2, lr=2e-3, strategy="zero0", eval_rows=4)
    assert run_training(config) == 0
    run = read_run(config.out)
    figures, missing = figures_of(gather([run.folder]))
    assert {figure.name for figure in figures} == CURVES - {"exposed"}  # one rank waits for nobody
    for figure in figures:
        assert figure.name == "memory" or len(figure.series[0].x) >= 5
    (loss,) = (figure for figure in figures if figure.name == "loss")
    assert [series.mark for series in loss.series] == ["line", "line"]  # and the validation losses
    assert [bool(series.marker) for series in loss.series] == [False, True]
    assert loss.series[0].colour != loss.series[1].colour
    assert missing[-1].startswith("Predicted against measured: ")
    header = dict(header_of(run))
    assert {"command", "started", "took", "host", "model", "data", "batch", "tokens", "loss"} <= header.keys()
    assert re.fullmatch(r"[0-9.]+ s, of which [0-9.]+ s in steps", header["took"])
    lowest = min(run.evaluations, key=lambda each: each.loss)
    assert header["loss"].endswith(f"the lowest {lowest.loss:.4f} at step {lowest.step}")
    chosen = header["not as by default"].split(", ")
    assert {"max_steps 6", "lr 0.002", "seq_len 16"} <= set(chosen)
    assert not [each for each in chosen if each.startswith(("min_lr", "out", "weight_decay"))]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(ISO.fullmatch(line["time"]) for line in lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    start = lines[0]
    assert start["command"]
    assert start["host"]
    assert re.fullmatch("[0-9a-f]{40}", start.get("commit", "0" * 40))
    assert (run.begun, run.last_at) == (lines[0]["time"], lines[-1]["time"])


def test_two_runs_are_still_compared(tmp_path):
    for name, steps in (("a", 5), ("b", 6)):
        write_run(tmp_path / name, num_steps=steps)
    names = {figure.name for figure in figures_of(gather([tmp_path]))[0]}
    assert "throughput" in names
    assert "lr" not in names


@pytest.mark.redundant
def test_stage_zero_holds_what_a_run_at_stage_zero_does(text_config, tmp_path):
    held = {}
    for name in ("zero0", "zero1", "zero2", "zero3"):
        config = text_config(strategy=name, out=str(tmp_path / name), max_steps=2, eval_interval=0)

        def rank_main(comm, config=config):
            run = build_run(config, comm, torch.device("cpu"))
            train(run)
            run.close()

        run_threads(rank_main, 2)
        found = read_run(tmp_path / name)
        held[name] = max((step.memory_bytes for step in found.steps), key=lambda each: sum(each.values()))
    for strategy in ("zero1", "zero2", "zero3"):
        expected = at_stage_zero(read_run(tmp_path / strategy), held[strategy])
        whole = {name: size for name, size in held["zero0"].items() if name in expected}
        assert expected == pytest.approx(whole, rel=0.02)  # padding


def test_nothing_is_said_of_stage_zero_where_it_is_not_known(tmp_path):
    for name, config in (("a", TrainConfig(strategy="fsdp2")), ("b", TrainConfig(strategy="zero0"))):
        write_run(tmp_path / name)
        text = (tmp_path / name / "config.toml").read_text()
        (tmp_path / name / "config.toml").write_text(text.replace('"zero2"', f'"{config.strategy}"'))
        assert at_stage_zero(read_run(tmp_path / name), {"params": 4}) == {}


@pytest.mark.redundant
def test_files_are_no_memory_and_state_on_the_host_has_colours_of_its_own(text_config, tmp_path):
    offload = {"state": "disk", "path": str(tmp_path / "files")}
    config = text_config(max_steps=2, eval_interval=0, strategy="zero2", offload=offload)
    assert run_training(config) == 0
    run = read_run(config.out)
    assert run.steps[-1].memory_bytes["disk_optimizer"] > 0
    (memory,) = (figure for figure in figures_of(gather([run.folder]))[0] if figure.name == "memory")
    names = {series.name for series in memory.series}
    assert {"params", "host grads", "host slots"} <= names
    assert not any(name.startswith("disk") for name in names)
    assert len({series.colour for series in memory.series}) == len(names)
    assert list(memory.x.ticks.values()) == ["measured"]  # what stage 0 would hold is not known


def test_a_run_without_times_steps_or_facts_is_reported(tmp_path):
    run = read_run(write_run(tmp_path / "old"))
    assert dict(header_of(run))["took"].endswith("in steps")
    page, names = write_report(gather([tmp_path / "old"]), tmp_path / "out")
    assert "loss.png" in names
    assert page.exists()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"event": "start", "time": 5, "about": 3}\n')
    write_report(gather([tmp_path / "old"]), tmp_path / "out")
    write_case(tmp_path / "case", TrainConfig(strategy="zero3", nproc=4))
    figures, _ = figures_of(gather([tmp_path / "case"]))
    (memory,) = (figure for figure in figures if figure.name == "memory")
    assert list(memory.x.ticks.values()) == ["measured", "planned", "stage 0"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_commit_is_read_without_running_git(tmp_path, packed):
    commit, git = "0123456789" * 4, tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    if packed:
        (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{commit} refs/heads/main\n")
    else:
        (git / "refs/heads/main").write_text(f"{commit}\n")
    (tmp_path / "a/b").mkdir(parents=True)
    assert commit_of(tmp_path) == commit_of(tmp_path / "a/b") == commit
    assert commit_of(tmp_path / "a/b", upwards=False) == ""
    linked = git / "worktrees/w"
    linked.mkdir(parents=True)
    (linked / "HEAD").write_text("ref: refs/heads/main\n")
    (linked / "commondir").write_text("../..\n")
    (tmp_path / "w").mkdir()
    (tmp_path / "w/.git").write_text(f"gitdir: {linked}\n")
    assert commit_of(tmp_path / "w") == commit
    (git / "HEAD").write_text("nonsense\n")
    assert commit_of(tmp_path) == ""
