import json
from pathlib import Path

import pytest

from tiny_runs import events_of, summary_of, train_on
from zeroshard.comm import LocalCommunicator, run_threads


@pytest.mark.redundant
def test_every_run_tells_the_seconds_of_a_steps_parts(tiny_config):
    config = tiny_config(grad_accum_steps=2)
    run_threads(lambda comm: train_on(comm, config), 2)
    assert "memory_peak" not in summary_of(config.out)
    assert not (Path(config.out) / "trace").exists()
    for step in events_of(config.out, "step"):
        assert set(step["spans_s"]) == {"data", "forward", "backward", "clip", "update"}
        assert 0 < sum(step["spans_s"].values()) <= step["step_s"]


@pytest.mark.redundant(but=["ddp"])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_the_peak_is_found_in_the_second_step(tiny_config, strategy):
    config = tiny_config(strategy=strategy, profile={"memory": True})
    train_on(LocalCommunicator(), config)
    peak = summary_of(config.out)["memory_peak"]
    assert peak["bytes"] == sum(peak["by_category"].values())
    assert peak["phase"] in ("forward", "backward", "update")
    last = events_of(config.out, "step")[-1]["memory_bytes"]
    assert peak["bytes"] > sum(last.values())  # activations too


@pytest.mark.redundant
def test_a_recorded_step_has_the_same_bits(tiny_config):
    losses = []
    for name, memory in (("plain", False), ("recorded", True)):
        config = tiny_config(profile={"memory": memory}, out=f"{tiny_config().out}-{name}")
        train_on(LocalCommunicator(), config)
        losses.append([step["loss"] for step in events_of(config.out, "step")])
    assert losses[0] == losses[1]


@pytest.mark.redundant
@pytest.mark.parametrize(("trace_steps", "max_steps"), [(2, 6), (9, 4)])
def test_a_trace_is_a_file_of_each_rank_with_its_units(tiny_config, trace_steps, max_steps):
    config = tiny_config(strategy="zero3", profile={"trace_steps": trace_steps}, max_steps=max_steps)
    train_on(LocalCommunicator(), config)
    folder = Path(config.out) / "trace"
    assert [path.name for path in folder.iterdir()] == ["rank-00000.json"]
    events = json.loads((folder / "rank-00000.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    traced = min(trace_steps, max_steps - 2)
    for unit in ("root", "blocks.0", "blocks.1"):
        assert names.count(f"backward {unit}") == traced
        assert names.count(f"forward {unit}") >= traced


def _traced_rank(comm, config):
    train_on(comm, config)


def test_each_process_traces_its_collectives(tiny_config, gloo_ranks):
    config = tiny_config(strategy="zero2", profile={"trace_steps": 1}, max_steps=4, eval_interval=0)
    gloo_ranks(2).run(_traced_rank, config)
    for rank in range(2):
        events = json.loads((Path(config.out) / f"trace/rank-{rank:05}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events if event["ph"] == "X"}
        assert names >= {"forward blocks.0", "backward blocks.1", "reduce_scatter root/grads", "wait root/grads"}, rank
