import itertools
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.train.profiling.trace import RankTrace, named_units


class _Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def _record(tmp_path, kind=nn.Linear):
    net = nn.Sequential(*(kind(8, 8) for _ in range(3)))
    trace = RankTrace([(f"blocks.{i}", module) for i, module in enumerate(net)], torch.device("cpu"))
    trace.start()
    net(torch.ones(2, 8)).sum().backward()
    trace.stop(tmp_path / "rank.json")
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
