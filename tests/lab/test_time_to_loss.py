"""Remedies by name, the runs by which a sweep knows the time to a loss, and what follows from their folders."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from zeroshard.errors import UserError
from zeroshard.lab.report.entries import gather
from zeroshard.lab.report.figures import figures_of
from zeroshard.lab.report.time_figures import time_table
from zeroshard.lab.run_folders import read_run
from zeroshard.lab.sweep.board import SweepProgress
from zeroshard.lab.sweep.cases import SweepConfig, cases_of
from zeroshard.lab.sweep.remedies import settings_of
from zeroshard.lab.sweep.results import SWEEP_FORMAT, read_sweep, run_folder
from zeroshard.lab.sweep.time_to_loss import sweep_cases, times_to_loss
from zeroshard.train.config.toml import dump_toml
from zeroshard.train.config.validate import validate

REMEDIES = ["none", "int8", "every=4"]
LOSSES = {"none": 8.0, "int8": 8.1, "every=4": 12.0}  # after the first step; the last never comes down to the target
MEETING_S = 0.9


def sweep(**kwargs) -> SweepConfig:
    base = {"nproc": 2, "max_steps": 40, "eval_interval": 4, "warmup_steps": 30, **kwargs.pop("base", {})}
    return validate(SweepConfig, {"base": base, **kwargs})


def racing(**kwargs) -> SweepConfig:
    axes = {"link.bandwidth": ["10Mbit/s", "1Gbit/s"], "strategy": ["zero2", "zero3"]}
    asked = {"remedies": REMEDIES, "time_to_loss": True, "axes": axes, "base": {"link": {"mode": "simulated"}}}
    return sweep(**{**asked, **kwargs})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("none", {}),
        ("int8", {"wire.weights": "int8", "wire.grads": "int8"}),
        ("int8, int4", {"wire.weights": "int8", "wire.grads": "int4"}),
        ("bf16,block=64", {"wire.weights": "bfloat16", "wire.grads": "bfloat16", "wire.block": 64}),
        ("every=32,int8", {"replicas.every": 32, "replicas.wire": "int8"}),
        (
            "every=32,fragments=4,overlap=2",
            {"replicas.every": 32, "replicas.fragments": 4, "replicas.overlap_steps": 2},
        ),
        ("int8,node-copy=2", {"wire.weights": "int8", "wire.grads": "int8", "node_copy": 2}),
        ("every=8,outer-lr=0.5", {"replicas.every": 8, "replicas.outer_lr": 0.5}),
    ],
)
def test_a_remedy_is_settings_by_name(name, settings):
    assert settings_of(name) == settings


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"remedies": ["int9"]}, r"remedies: 'int9': there is no 'int9'; did you mean int"),
        ({"remedies": ["every"]}, r"remedies: 'every': there is no 'every'"),
        ({"remedies": ["none,int8"]}, r"remedies: 'none,int8': there is no 'none'"),
        ({"remedies": ["every=x"]}, r"remedies: 'every=x': 'x' is not a whole number; write every=32"),
        ({"remedies": ["every=1"]}, r"remedies: 'every=1': replicas that meet at each step take no local steps"),
        ({"remedies": ["every=8,every=9"]}, r"remedies: 'every=8,every=9' has every twice"),
        ({"remedies": ["int8,int4,int8"]}, r"remedies: 'int8,int4,int8' has 3 formats; give at most 2"),
        ({"remedies": ["every=8,int8,int4"]}, r"has 2 formats; give at most 1: local steps send differences"),
        ({"remedies": ["int8", "int8,int8"]}, r"remedies: 'int8,int8' is 'int8' in other words"),
        ({"remedies": ["int8", "int8"]}, r"remedies: 'int8' is given twice; leave one of both out"),
        ({"remedies": ["none"], "base": {"wire": {"grads": "int8"}}}, r"base\.wire\.grads: remedies set it"),
        ({"remedies": ["none"], "axes": {"replicas.every": [1, 2]}}, r"axes\.replicas\.every: remedies set it"),
        ({"remedies": ["none"], "axes": {"x": [{"node_copy": 2}]}}, r"axes\.node_copy: remedies set it"),
        ({"axes": {"remedy": ["int8"]}}, r"axes\.remedy: there is no such setting; write remedies beside the table"),
        ({"remedies": ["none"], "crossover": ["zero2", "zero3"]}, r"remedies: a crossover compares two strategies"),
        ({"time_to_loss": True, "fit_memory": "1GiB"}, r"fit_memory: each stage has a micro-batch of its own"),
        ({"target_loss": 2.0}, r"target_loss: 2.0 is given, and nothing is timed; add --time-to-loss"),
        ({"time_to_loss": True, "base": {"eval_interval": 0}}, r"base\.eval_interval: 0 evaluates at the end alone"),
    ],
)
def test_a_remedy_that_means_nothing_is_refused_in_a_line(kwargs, line):
    def runs():
        asked = sweep(**kwargs)
        return sweep_cases(asked, cases_of(asked))

    with pytest.raises(UserError, match=line):
        runs()


def test_remedies_are_an_axis_and_local_steps_take_a_nodes_ranks_as_a_replica():
    link = {"mode": "simulated", "bandwidth": "1Gbit/s", "node_size": 2}
    asked = sweep(remedies=["none", "every=4"], axes={"strategy": ["zero2", "zero3"]}, base={"link": link, "nproc": 4})
    found = [(case.axes, case.config.replicas.every, case.config.shard_size) for case in cases_of(asked)]
    assert found == [
        ({"strategy": "zero2", "remedy": "none"}, 1, 0),
        ({"strategy": "zero2", "remedy": "every=4"}, 4, 2),
        ({"strategy": "zero3", "remedy": "none"}, 1, 0),
        ({"strategy": "zero3", "remedy": "every=4"}, 4, 2),
    ]
    (own,) = cases_of(sweep(remedies=["every=4"], base={"shard_size": 1}))
    assert own.config.shard_size == 1


def test_a_remedy_is_trained_to_the_end_once_whatever_the_stage_and_the_link():
    asked = racing(timed_steps=6)
    cases = sweep_cases(asked, cases_of(asked))
    curves, timed = [case for case in cases if case.is_curve], [case for case in cases if not case.is_curve]
    assert [case.axes for case in curves] == [{"remedy": name} for name in REMEDIES]
    assert all(case.config.link.mode == "none" and case.config.max_steps == 40 for case in curves)
    assert len(timed) == 2 * 2 * 3
    assert {case.axes["remedy"]: case.curve for case in timed} == dict(
        zip(REMEDIES, (c.name for c in curves), strict=True)
    )
    lengths = {case.axes["remedy"]: case.config.max_steps for case in timed}
    assert lengths == {"none": 8, "int8": 8, "every=4": 2 + 2 * 4}  # two that warm up, and whole rounds
    assert {(case.config.decay_steps, case.config.warmup_steps) for case in timed} == {
        (40, 30)
    }  # the rates of the curve
    zeros = racing(timed_steps=6, axes={"link.bandwidth": ["1Gbit/s"], "strategy": ["zero0", "zero3"]})
    curves = [case.axes["remedy"] for case in sweep_cases(zeros, cases_of(zeros)) if case.is_curve]
    assert curves == ["none", "every=4", "none", "int8", "every=4"]  # stage 0 adds up otherwise; int8 it has not


def write(folder: Path, asked: SweepConfig, wrong: str = "") -> Path:
    """The sweep's folder with every case done; ``wrong``: a remedy whose timed steps have other losses."""
    entries = []
    for case in sweep_cases(asked, cases_of(asked)):
        config, remedy = case.config, case.axes["remedy"]
        facts = {"name": case.name, "axes": case.axes, "repeats": 1, "refusal": "", "curve": case.curve}
        entries.append(facts)
        run = run_folder(folder, case.name, 0)
        run.mkdir(parents=True)
        (run / "config.toml").write_text(dump_toml(config.model_copy(update={"out": str(run)})))
        fast = config.link.bandwidth == "1Gbit/s"
        lines = [{"event": "start", "step": 0, "world_size": 2}]
        for step in range(1, config.max_steps + 1):
            loss = LOSSES[remedy] / step**0.5 + (0.5 if remedy == wrong and not case.is_curve else 0.0)
            meets = step % config.replicas.every == 0
            step_s = 0.1 + (0.0 if fast or not meets else MEETING_S)
            lines.append({"event": "step", "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1.0, "step_s": step_s})
            lines[-1] |= {"tokens": step, "tokens_per_s": 1 / step_s, "comm": {"all_reduce": 100 if meets else 0}}
            if case.is_curve and step % config.eval_interval == 0:
                lines.append({"event": "eval", "step": step, "loss": loss})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "summary.json").write_text(json.dumps({"status": "ok"}))
    facts = {"format": SWEEP_FORMAT, **asked.model_dump(mode="json"), "cases": entries}
    (folder / "sweep.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return write(tmp_path_factory.mktemp("time") / "sweep", racing(timed_steps=4))


def test_the_time_to_a_loss_is_steps_to_it_times_the_measured_step(done):
    times = times_to_loss(read_sweep(done))
    assert times.target == pytest.approx(8.0 / 32**0.5)  # of 40 steps 80 %
    assert times.why == "what none has after 32 of 40 steps"
    rows = {(row.remedy, *[row.case.axes[name] for name in ("strategy", "link.bandwidth")]): row for row in times.rows}
    assert len(rows) == 12
    none, int8, local = (rows[name, "zero2", "10Mbit/s"] for name in REMEDIES)
    assert (none.steps, int8.steps, local.steps) == (32, 36, None)
    assert none.seconds.median == pytest.approx(32 * 1.0)
    assert int8.seconds.median == pytest.approx(36 * 1.0)
    assert (local.seconds, local.fate) == (None, "not reached in 40 steps")
    assert local.case.step_s.median == pytest.approx(0.1 + MEETING_S / 4)  # the mean of a round, not its median step
    assert (none.bytes_per_step, local.bytes_per_step) == (200.0, 50.0)
    assert rows["none", "zero3", "1Gbit/s"].seconds.median == pytest.approx(3.2)
    assert not any(row.differs for row in times.rows)


def test_a_target_may_be_asked_for(tmp_path):
    times = times_to_loss(read_sweep(write(tmp_path / "sweep", racing(timed_steps=4, target_loss=2.0))))
    assert (times.target, times.why) == (2.0, "as asked for")
    assert {row.remedy: row.steps for row in times.rows} == {"none": 16, "int8": 20, "every=4": 36}


def test_timed_steps_with_other_losses_than_their_curve_are_said(tmp_path):
    folder = write(tmp_path / "sweep", racing(timed_steps=4), wrong="int8")
    times = times_to_loss(read_sweep(folder))
    assert {row.remedy for row in times.rows if row.differs} == {"int8"}
    notices = gather([folder]).notices
    assert next(each.line for each in notices if "int8" in each.about) == (
        "from step 1 on its losses are not those of its curve"
    )


def test_a_sweep_says_when_each_case_is_at_the_target(done):
    stream = io.StringIO()
    SweepProgress(stream).say_results(done)
    lines = stream.getvalue().splitlines()
    assert lines[-1] == "target: validation loss 1.4142, what none has after 32 of 40 steps"
    assert any("zero2  none" in line and "32.0 s to the target, reached after 32 steps" in line for line in lines)
    assert any("zero3  every=4" in line and line.endswith("not reached in 40 steps") for line in lines)


def test_a_report_draws_loss_by_time_and_bytes_and_the_time_to_the_target(done):
    material = gather([done])
    figures = {figure.name: figure for figure in figures_of(material)[0]}
    reached = figures["time-to-loss"]
    assert [(line.name, line.dashed) for line in reached.series] == [
        ("none", False),
        ("int8", False),
        ("every=4: not reached in 40 steps", True),
    ]
    assert reached.x.log
    assert reached.y.log
    assert reached.series[0].y == pytest.approx((32.0, 3.2))
    assert reached.series[2].y[0] == pytest.approx(40 * (0.1 + MEETING_S / 4))  # a lower bound
    assert {"time-to-loss-2", *(f"loss-by-seconds{n}" for n in ("", "-2", "-3", "-4")), "loss-by-bytes"} <= set(figures)
    by_bytes = figures["loss-by-bytes"].series
    assert [line.x[0] for line in by_bytes[:3]] == pytest.approx([4 * 200e-6, 4 * 200e-6, 4 * 50e-6])
    assert by_bytes[-1].name == "target 1.4142"
    assert figures["loss-by-bytes"].y.log
    assert [line.name for line in figures["loss"].series if line.mark == "line"] == [
        f"{n} (to the end)" for n in REMEDIES
    ]
    table = time_table(material.times[0])
    assert table.titles[-1] == "times as fast as none"
    assert table.rows[0] == ("none", "zero2", "10 Mbit/s", "1,000.0", "0.000", "32", "32.0", "1.00")
    assert table.rows[2][-3:] == ("not reached in 40 steps", "-", "-")


def test_without_the_first_curve_there_is_no_target_and_the_report_says_so(tmp_path):
    folder = write(tmp_path / "sweep", racing(timed_steps=4))
    first = next(case for case in read_sweep(folder).cases if case.is_curve)
    (run_folder(folder, first.name, 0) / "summary.json").unlink()
    times = times_to_loss(read_sweep(folder))
    assert math.isnan(times.target)
    assert not any(row.steps for row in times.rows)
    assert any(
        line.startswith("Time to a loss: no target: none has not ended well")
        for line in figures_of(gather([folder]))[1]
    )


def test_speeds_of_local_steps_are_those_of_whole_rounds(done):
    local = next(case for case in read_sweep(done).cases if case.axes == {"remedy": "every=4"})
    run = read_run(local.runs[0].folder)
    assert len(run.rounds) == 9  # of 38 settled steps
    assert run.step_s == pytest.approx(0.1 + MEETING_S / 4)
    assert run.tokens_per_s == pytest.approx(1 / run.step_s)
