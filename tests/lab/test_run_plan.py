"""The planner's side of a run's contract; `tests/train/test_plan_contract.py` has the run's."""

from dataclasses import replace

import pytest
import torch

from zeroshard.comm.links import Links
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.run_plan import behind, predict, predicted_step
from zeroshard.lab.predict.hardware import Calibration, Device, Link, read_calibration, write_calibration
from zeroshard.models import build_model
from zeroshard.settings.tables import LinkConfig
from zeroshard.train.records.plan_contract import Job
from zeroshard.zero import STAGES

DEVICE = Device("a machine", 1 << 34, {"float32": 1e10}, 1e10, "by hand", kernel_s=1e-5, device_type="cpu")
# So slow that only messages count: 1 s for each, and nothing for bytes.
LINK = Link("slow", 0.0, 1e9, "by hand", 0.0, 1.0, num_ranks=2)
OPS = ("all_reduce", "reduce_scatter", "all_gather")


def _model():
    with torch.device("meta"):
        return build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides={"n_layer": 3, "n_head": 2, "n_embd": 8})


def _step_s(stage, link, device=DEVICE):
    return predicted_step(_model(), STAGES[stage], 2, 1, 8, Calibration(device, link)).step_s


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("op", "stage", "count"), [("all_reduce", 0, 4), ("all_gather", 1, 4), ("reduce_scatter", 1, 4)]
)
def test_collectives_take_what_they_were_measured_to_take(op, stage, count):
    free = dict.fromkeys(OPS, (0.0, 0.0))
    without = _step_s(stage, replace(LINK, collectives=free))
    each = _step_s(stage, replace(LINK, collectives={**free, op: (1.0, 0.0)}))
    # The control message at the end of a backward is an all-reduce too.
    wanted = count + (op == "all_reduce")
    assert each - without == pytest.approx(wanted, rel=1e-3)


def test_measured_collectives_are_for_as_many_ranks_alone():
    measured = dict.fromkeys(OPS, (1.0, 0.0))
    assert _step_s(0, replace(LINK, collectives=measured, num_ranks=4)) < 1.0
    assert _step_s(0, replace(LINK, collectives=measured)) > 4.0


def test_on_a_cpu_the_engines_hooks_take_time_for_each_parameter():
    link = replace(LINK, collectives=dict.fromkeys(OPS, (0.0, 0.0)))
    num_params = len(list(_model().parameters()))
    for stage in range(4):
        hooked = _step_s(stage, link, replace(DEVICE, hook_s=1.0)) - _step_s(stage, link)
        assert hooked == pytest.approx(num_params)


def _job(**changes):
    job = Job(_model(), STAGES[2], 1, 2, torch.float32, 2, 1, 8, uniform_order=True, device_type="cpu")
    return replace(job, **changes)


def test_a_job_has_a_peak_above_what_it_holds_and_a_time_where_the_device_is_known(tmp_path):
    planned = predict(_job())
    assert planned.peak_bytes > sum(planned.memory_bytes.values())
    assert planned.step_s is None
    path = tmp_path / "device.json"
    write_calibration(path, Calibration(DEVICE, replace(LINK, collectives={"all_reduce": (1e-4, 1e-9)})))
    assert read_calibration(path).link.collectives == {"all_reduce": (1e-4, 1e-9)}
    assert predict(_job(calibration=str(path))).step_s > 0


@pytest.mark.redundant
def test_the_peak_of_a_compiled_run_is_that_of_its_graphs_on_a_gpu_alone():
    """One graph hands over all gradients at its end, so a tiny model's peak grows; nothing is resident in addition."""
    eager, *compiled = (
        predict(_job(device_type="cuda", compiled=compiled)) for compiled in ("", "compiled", "in pieces")
    )
    assert compiled[0].peak_bytes > compiled[1].peak_bytes
    assert all(each.memory_bytes == eager.memory_bytes for each in compiled)
    assert predict(_job(compiled="compiled")) == predict(_job())


def test_a_rank_that_wants_no_estimates_has_the_rest():
    full = predict(_job())
    assert predict(_job(estimates=False)) == replace(full, peak_bytes=None, step_s=None)


def test_an_average_is_held_too():
    plain, averaged = predict(_job()), predict(_job(keeps_ema=True))
    num_bytes = averaged.memory_bytes["ema"]
    # Shards begin at aligned elements, so that the first rank may own somewhat less than half.
    assert num_bytes * 2 >= 0.94 * sum(p.numel() for p in _model().parameters()) * 4
    assert averaged.peak_bytes == plain.peak_bytes + num_bytes


def test_a_calibration_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"plan.device: cannot read nowhere.json"):
        predict(_job(calibration="nowhere.json"))


def test_a_calibration_of_one_rank_says_nothing_of_several(tmp_path):
    path = tmp_path / "device.json"
    write_calibration(path, Calibration(DEVICE))
    with pytest.raises(UserError, match=r"was measured on one rank, and this run has 2; write one by zeroshard bench"):
        predict(_job(calibration=str(path)))
    alone = predict(_job(calibration=str(path), rank=0, world_size=1, shard_size=1))
    assert alone.step_s > 0


def _behind(measured, **asked):
    return behind(measured, Links.of(LinkConfig(mode="simulated", **asked)))


def test_a_collective_behind_a_slower_link_takes_what_the_slower_of_the_two_takes():
    measured = replace(LINK, num_ranks=4, collectives={"all_reduce": (1e-3, 1e-9), "all_gather": (2e-3, 1e-7)})
    slowed = _behind(measured, bandwidth="8Mbit/s", latency="1ms")
    # of each byte, 2 * 3/4 and 3/4 pass a link, at 1 MB/s; a ring of four has 6 hops and 3
    assert slowed.collectives["all_reduce"] == pytest.approx((7e-3, 1.5e-6))
    assert slowed.collectives["all_gather"] == pytest.approx((5e-3, 0.75e-6))
    fast = _behind(measured, bandwidth="80Gbit/s")
    assert fast.collectives == measured.collectives
    assert slowed.beside == measured.beside


def test_ranks_of_one_node_are_not_behind_its_link():
    measured = replace(LINK, collectives={"all_gather": (0.0, 1e-9)})
    assert _behind(measured, bandwidth="1Mbit/s", node_size=2) == measured
    both = _behind(replace(measured, num_ranks=4), bandwidth="8Mbit/s", node_size=2)
    assert both.collectives["all_gather"] == pytest.approx((0.0, 0.75e-6))


def test_the_time_of_a_run_behind_a_link_is_planned_with_it(tmp_path):
    path = tmp_path / "device.json"
    write_calibration(path, Calibration(DEVICE, replace(LINK, collectives=dict.fromkeys(OPS, (0.0, 1e-12)))))
    plain, slow = (
        predict(_job(calibration=str(path), links=Links.of(config))).step_s
        for config in (LinkConfig(), LinkConfig(mode="netns", bandwidth="1Mbit/s"))
    )
    sent = sum(message.num_bytes for message in predict(_job()).messages) / 2  # of each byte half passes the link
    assert slow - plain == pytest.approx(sent / 125e3, rel=0.05)
