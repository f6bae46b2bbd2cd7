"""The engine that a plan drives, over tensors without memory: what it is seen to do, by hand."""

import pytest
from torch import nn

from zeroshard.lab.predict.actions import Issue, Settings, Wait
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.engine import Change, recorded
from zeroshard.lab.predict.model_spans import Event
from zeroshard.zero import STAGES, MixedPrecision

BYTES = 16 * 16 * 4  # of one unit's weights


def _actions(stage, world_size, *, num_replicas=1, syncs=(True,), **settings):
    """Of a root and two units: by event, what the engine does in the last micro-batch."""
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    buffers = tuple(buffers_of(net, world_size, [net[0], net[1]]))
    events = (
        Event("pre_forward"),
        *(event for p in (0, 1) for event in (Event("pre_forward", p), Event("post_forward", p, grads_flow=True))),
        Event("post_forward", grads_flow=True),
        Event("pre_backward"),
        Event("grad", param="2.weight"),
        *(
            event
            for p in (1, 0)
            for event in (Event("pre_backward", p), Event("grad", p, "weight"), Event("post_backward", p))
        ),
        Event("backward_over"),
    )
    chosen = Settings(STAGES[stage], MixedPrecision(), num_replicas=num_replicas, **settings)
    micro_batches = recorded(events, ("0", "1"), buffers, chosen, syncs)
    return list(zip(events, micro_batches[-1], strict=True))


def _sent(actions):
    return [(e.message.op, e.message.buffer, e.replicas) for _, done in actions for e in done if isinstance(e, Issue)]


def _sum(actions, category):
    return sum(e.num_bytes for _, done in actions for e in done if isinstance(e, Change) and e.category == category)


def test_weights_on_their_way_are_in_use_once_they_are_waited_for():
    actions = _actions(3, 4)
    begins, first = actions[0], actions[1]
    changes = [e.num_bytes for e in begins[1] if isinstance(e, Change) and e.category == "prefetch"]
    assert changes == [BYTES, BYTES, -BYTES]  # the root and unit 0 set out, the root has come
    assert _sum([first], "prefetch") == BYTES - BYTES  # unit 0 has come, unit 1 sets out
    assert _sum([first], "unit_buffers") == BYTES
    assert _sum(actions, "prefetch") == _sum(actions, "unit_buffers") == 0  # all are freed in the end


def test_each_collective_is_waited_for():
    actions = [each for _, done in _actions(2, 4) for each in done]
    assert {e.number for e in actions if isinstance(e, Issue)} == {e.number for e in actions if isinstance(e, Wait)}


@pytest.mark.parametrize(("world_size", "expected"), [(4, []), (3, [BYTES, -BYTES] * 3)])
def test_what_comes_and_goes_within_one_event_is_temporary(world_size, expected):
    actions = _actions(0, world_size, syncs=(False, True))  # a mean over 3 ranks is rounded before it is added
    changes = [e for _, done in actions for e in done if isinstance(e, Change) and e.category == "temporaries"]
    assert [e.num_bytes for e in changes if abs(e.num_bytes) > 64] == expected  # but for control messages


@pytest.mark.parametrize(("device_type", "num_waits"), [("cpu", 2), ("cuda", 1)])
def test_a_reduction_in_two_parts_is_waited_for_once_on_a_gpu(device_type, num_waits):
    """Over NCCL stage 0 scatters and gathers; between the two a stream waits on which nothing computes."""
    actions = _actions(0, 4, uniform_order=False, device_type=device_type)
    parts = [(op, name, False) for name in ("1", "0", "root") for op in ("reduce_scatter", "all_gather")]
    assert _sent(actions) == [*parts, ("all_reduce", "control", False)]
    assert sum(isinstance(each, Wait) for _, done in actions for each in done) == 3 * num_waits + 1
