"""The planner's side of a run's contract; `tests/train/test_contract.py` has the run's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zeroshard.errors import UserError
from zeroshard.lab.contract import predict, predicted_step
from zeroshard.lab.hardware import Calibration, Device, Link, read_calibration, write_calibration
from zeroshard.models import build_model
from zeroshard.train.contract import Job
from zeroshard.zero import STAGES

DEVICE = Device("a machine", 1 << 34, {"float32": 1e10}, 1e10, "by hand", kernel_s=1e-5, device_type="cpu")
# So slow that only messages count: 1 s for each, and nothing for bytes.
LINK = Link("slow", 0.0, 1e9, "by hand", 0.0, 1.0, num_ranks=2)
OPS = ("all_reduce", "reduce_scatter", "all_gather")


def _model():
    with torch.device("meta"):
        return build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides={"n_layer": 3, "n_head": 2, "n_embd": 8})


def _step_s(stage, link, device=DEVICE, **kwargs):
    return predicted_step(_model(), STAGES[stage], 2, 1, 8, Calibration(device, link), **kwargs).step_s


@pytest.mark.parametrize(("op", "stage", "count"), [("all_reduce", 0, 4), ("all_gather", 1, 4), ("reduce_scatter", 1, 4)])
def test_collectives_take_what_they_were_measured_to_take(op, stage, count):
    free = dict.fromkeys(OPS, (0.0, 0.0))
    without = _step_s(stage, replace(LINK, collectives=free))
    each = _step_s(stage, replace(LINK, collectives={**free, op: (1.0, 0.0)}))
    # The control message at the end of a backward is an all-reduce too.
    wanted = count + (op == "all_reduce")
    assert each - without == pytest.approx(wanted, rel=1e-3)


def test_measured_collectives_are_for_as_many_ranks_alone():
    measured = {op: (1.0, 0.0) for op in OPS}
    assert _step_s(0, replace(LINK, collectives=measured, num_ranks=4)) < 1.0
    assert _step_s(0, replace(LINK, collectives=measured)) > 4.0


def test_what_computation_does_not_hide_is_paid_for():
    collectives = {op: (1e-3, 0.0) for op in OPS}
    slow = replace(DEVICE, kernel_s=1.0)  # computation takes far longer: all could be hidden
    hidden, paid = (_step_s(0, replace(LINK, collectives=collectives, hides=h), slow) for h in (1.0, 0.0))
    # The root's reduction and the control message are not beside computation in any case.
    assert paid - hidden == pytest.approx(3e-3, rel=0.4)


def test_clipping_takes_time():
    link = replace(LINK, collectives={op: (1.0, 0.0) for op in OPS})
    assert _step_s(1, link, clips=True) - _step_s(1, link) == pytest.approx(1.0, rel=0.01)  # an all-gather of the norms


def _job(**changes):
    job = Job(_model(), STAGES[2], 1, 2, 2, torch.float32, 2, 1, 8, uniform_order=True, device_type="cpu")
    return replace(job, **changes)


def test_a_job_has_a_peak_above_what_it_holds_and_a_time_where_the_device_is_known(tmp_path):
    planned = predict(_job())
    assert planned.peak_bytes > sum(planned.memory_bytes.values())
    assert planned.step_s is None
    path = tmp_path / "device.json"
    write_calibration(path, Calibration(DEVICE, replace(LINK, collectives={"all_reduce": (1e-4, 1e-9)}, hides=0.5)))
    assert read_calibration(path).link.collectives == {"all_reduce": (1e-4, 1e-9)}
    assert predict(_job(calibration=str(path))).step_s > 0


def test_an_average_is_held_too():
    plain, averaged = predict(_job()), predict(_job(keeps_ema=True))
    num_bytes = averaged.memory_bytes["ema"]
    assert num_bytes * 2 >= sum(p.numel() for p in _model().parameters()) * 4
    assert averaged.peak_bytes == plain.peak_bytes + num_bytes


def test_a_calibration_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"plan.device: cannot read nowhere.json"):
        predict(_job(calibration="nowhere.json"))
