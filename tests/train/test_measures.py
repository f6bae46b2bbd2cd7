import json
from pathlib import Path

import pytest

from tiny_runs import events_of, summary_of, train_on
from zeroshard.comm import Link, LocalCommunicator, ThrottledCommunicator, run_threads
from zeroshard.profiling.memory import POINTS


def test_every_run_tells_memory_at_three_points_and_the_seconds_of_a_steps_parts(tiny_config):
    config = tiny_config(grad_accum_steps=2)
    run_threads(lambda comm: train_on(comm, config), 2)
    points = summary_of(config.out)["memory_points_bytes"]
    assert tuple(points) == POINTS
    assert points["initialised"]["grads"] == points["before_step"]["optimizer"] == 0
    assert points["after_step"]["optimizer"] > points["after_step"]["params"]
    assert not {"memory_peak", "overlap_s_per_step"} & summary_of(config.out).keys()
    assert not (Path(config.out) / "trace").exists()
    for step in events_of(config.out, "step"):
        assert set(step["spans_s"]) == {"data", "forward", "backward", "clip", "update"}
        assert 0 < sum(step["spans_s"].values()) <= step["step_s"]


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_the_peak_is_found_in_the_second_step(tiny_config, strategy):
    config = tiny_config(strategy=strategy, profile={"memory": True})
    train_on(LocalCommunicator(), config)
    peak = summary_of(config.out)["memory_peak"]
    assert peak["bytes"] == sum(peak["by_category"].values())
    assert peak["phase"] in ("forward", "backward", "update")
    held = sum(summary_of(config.out)["memory_points_bytes"]["initialised"].values())
    assert peak["bytes"] > 3 * held  # states, and activations


def test_a_recorded_step_has_the_same_bits(tiny_config):
    losses = []
    for name, memory in (("plain", False), ("recorded", True)):
        config = tiny_config(profile={"memory": memory}, out=f"{tiny_config().out}-{name}")
        train_on(LocalCommunicator(), config)
        losses.append([step["loss"] for step in events_of(config.out, "step")])
    assert losses[0] == losses[1]


def test_over_simulated_links_a_units_messages_are_under_way_for_as_long_as_these_take(tiny_config):
    config = tiny_config(strategy="zero3", profile={"overlap": True})
    link = Link(latency_s=5e-3)
    run_threads(lambda comm: train_on(ThrottledCommunicator(comm, link), config), 2)
    found = summary_of(config.out)["overlap_s_per_step"]
    for label in ("blocks.0/weights/forward", "blocks.0/grads/backward"):
        assert found[label]["total"] > 0.99 * link.latency_s  # two clocks are read, some nanoseconds apart
        assert found[label]["exposed"] > 0


@pytest.mark.parametrize(("trace_steps", "max_steps"), [(2, 6), (9, 4)])
def test_a_trace_is_one_file_with_every_rank_and_its_units(tiny_config, trace_steps, max_steps):
    config = tiny_config(strategy="zero3", profile={"trace_steps": trace_steps}, max_steps=max_steps)
    train_on(LocalCommunicator(), config)
    folder = Path(config.out) / "trace"
    assert [path.name for path in folder.iterdir()] == ["trace.json"]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    traced = min(trace_steps, max_steps - 2)
    for unit in ("root", "blocks.0", "blocks.1"):
        assert names.count(f"backward {unit}") == traced
        assert names.count(f"forward {unit}") >= traced
    assert {event["pid"] for event in events} == {0}


def _traced_rank(comm, config):
    train_on(comm, config)


def test_ranks_of_processes_share_a_clock(tiny_config, gloo_ranks):
    config = tiny_config(strategy="zero2", profile={"trace_steps": 1}, max_steps=4, eval_interval=0)
    gloo_ranks(2).run(_traced_rank, config)
    events = json.loads((Path(config.out) / "trace" / "trace.json").read_text())["traceEvents"]
    by_rank = {rank: [e for e in events if e["pid"] == rank and e["ph"] == "X"] for rank in range(2)}
    for rank, mine in by_rank.items():
        assert {e["name"] for e in mine} >= {"forward blocks.0", "backward blocks.1", "reduce_scatter root/grads"}, rank
        under_way = [e["name"] for e in mine if e.get("cat") == "communication"]
        assert "blocks.0/grads/backward" in under_way
    # A reduction of both ends on both at the same time, within what threads of a busy machine take to be woken.
    ends = [
        next(e["ts"] + e["dur"] for e in mine if e.get("cat") == "communication" and e["name"] == "root/grads/backward")
        for mine in by_rank.values()
    ]
    assert abs(ends[0] - ends[1]) < 200_000  # microseconds
