import itertools
import json
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.profiling.overlap import TimedOperation
from zeroshard.profiling.trace import (
    RankTrace,
    clock_offsets,
    merge_files,
    merged,
    named_units,
    wall_minus_monotonic_s,
    with_operations,
)


class _Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def _record(tmp_path, kind=nn.Linear, operations=lambda began: ()):
    net = nn.Sequential(*(kind(8, 8) for _ in range(3)))
    trace = RankTrace([(f"blocks.{i}", module) for i, module in enumerate(net)], torch.device("cpu"))
    trace.start()
    began = time.perf_counter()
    net(torch.ones(2, 8)).sum().backward()
    trace.stop(tmp_path / "rank.json", operations(began))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net)
    return json.loads((tmp_path / "rank.json").read_text())


def _spans(trace, *kinds):
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"].split()[0] in kinds]


@pytest.mark.parametrize("kind", [nn.Linear, _Checkpointed])
def test_spans_have_the_units_names_in_the_order_of_execution(tmp_path, kind):
    spans = sorted(_spans(_record(tmp_path, kind), "forward", "backward"), key=lambda span: span["ts"])
    assert [span["name"] for span in spans] == [
        *(f"forward blocks.{i}" for i in range(3)),
        *(f"backward blocks.{i}" for i in (2, 1, 0)),
    ]
    for one, next_ in itertools.pairwise(spans):
        assert one["ts"] + one["dur"] <= next_["ts"] + 1


def test_a_forward_that_fails_leaves_no_span_open(tmp_path):
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError

    net = Fails()
    with torch.profiler.profile() as profile, named_units([("a", net)]), pytest.raises(KeyError):
        net(torch.ones(1))
    assert "forward a" in {event.name for event in profile.events()}


def test_what_was_under_way_lies_where_its_spans_lie(tmp_path):
    def operations(began):
        now = time.perf_counter()
        return [TimedOperation("root/weights/forward", began, now), TimedOperation("control", began, now + 0.001)]

    trace = _record(tmp_path, operations=operations)
    gather, control = [event for event in trace["traceEvents"] if event.get("cat") == "communication"]
    spans = _spans(trace, "forward", "backward")
    first, last = min(span["ts"] for span in spans), max(span["ts"] + span["dur"] for span in spans)
    assert gather["ts"] - 200 < first
    assert last < gather["ts"] + gather["dur"] + 200  # microseconds between two clocks
    assert control["ts"] == pytest.approx(gather["ts"] + gather["dur"])  # one thing at a time in one track
    names = [event["args"]["name"] for event in trace["traceEvents"] if event.get("name") == "thread_name"]
    assert "communication under way" in names


def _event(name, ts, **more):
    return {"ph": "X", "name": name, "pid": 77, "tid": 1, "ts": ts, "dur": 1.0, **more}


def test_ranks_are_processes_on_one_clock():
    traces = {
        0: {"baseTimeNanoseconds": 2_000_000_000, "traceEvents": [_event("a", 10.0)]},
        1: {"baseTimeNanoseconds": 1_000_000_000, "traceEvents": [_event("b", 1_000_105.0)]},
    }
    found = merged(traces, offsets_s=[0.0, 100e-6])  # rank 1's clock is 100 us ahead
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [(span["name"], span["pid"]) for span in spans] == [("b", 1), ("a", 0)]
    assert [span["ts"] for span in spans] == pytest.approx([0.0, 5.0])
    assert found["baseTimeNanoseconds"] == 2_000_005_000
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]


def test_arrows_stay_within_their_rank_and_summaries_go():
    arrow = [_event("fwdbwd", 1.0, ph="s", id=3), _event("fwdbwd", 2.0, ph="f", id=3)]
    summary = {**_event("PyTorch Profiler", 0.0), "pid": "Spans"}
    found = merged({rank: {"traceEvents": [*arrow, summary]} for rank in range(2)})
    ids = [event["id"] for event in found["traceEvents"] if event["ph"] in "sf"]
    assert sorted(ids.count(each) for each in set(ids)) == [2, 2]
    assert not [event for event in found["traceEvents"] if event["name"] == "PyTorch Profiler"]


def test_the_ranks_files_become_one(tmp_path):
    paths = {rank: tmp_path / f"{rank}.json" for rank in range(2)}
    for path in paths.values():
        path.write_text(json.dumps({"traceEvents": [_event("a", 1.0)]}))
    merge_files(paths, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 6


def test_offsets_are_those_of_most_rounds():
    rounds = [[10.0, 12.0, 9.5], [20.0, 22.0, 19.5], [30.0, 32.5, 29.5]]
    assert clock_offsets(rounds) == [0.0, 2.0, -0.5]


def test_the_wall_clock_is_tied_to_the_monotonic_one():
    offset_s = wall_minus_monotonic_s()
    before, found, after = time.time(), time.perf_counter() + offset_s, time.time()
    assert before - 0.01 < found < after + 0.01


def test_an_empty_trace_gets_no_empty_track():
    assert with_operations({"traceEvents": []}, [], 0.0)["traceEvents"] == []
