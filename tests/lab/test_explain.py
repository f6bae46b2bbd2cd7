import pytest

from lab.small_plans import SMALL, small_gpu
from zeroshard.lab.planner.explain import explain
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.planner.show import size


@pytest.mark.redundant
def test_what_a_step_sends_is_told_by_link():
    planner = planner_for("gpt2-demo", world_size=16, gpu=small_gpu(10**9), overrides=SMALL)
    told = explain(planner, planner.row(2, 2))
    for word in ("reduce_scatter among 16 ranks, between nodes: 7 in a step, buffers of", "Fullest in the"):
        assert word in told


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("h100-80gb", ("fitted to published runs", "cudnn", "H100 data sheet", "9.6 us a step", "four of five lay")),
        ("mi300x-192gb", ("one published run", "an H100's FLOP/s", "xgmi3", "to which nothing was fitted")),
        ("l40s-48gb", ("no published run on such a device", "pcie4", "to which nothing was fitted")),
    ],
)
def test_rates_are_told_with_their_sources_and_how_sure_they_are(gpu, words):
    planner = planner_for("gpt2-demo", world_size=16, gpu=gpu, gpus_per_node=8, network="400Gbit/s", overrides=SMALL)
    told = explain(planner, planner.row(3, 2))
    for word in words:
        assert word in told


def test_less_than_nothing_is_told_with_its_sign_and_unit():
    assert [size(n) for n in (-(2**29), -1536, -3, 3 * 2**30)] == ["-512.0 MiB", "-1.5 KiB", "-3 B", "3.0 GiB"]


def test_of_a_measured_device_no_range_is_told():
    planner = planner_for("gpt2-demo", world_size=1, gpu=small_gpu(10**9), overrides=SMALL)
    told = explain(planner, planner.row(0, 2))
    assert "device  4 TFLOP/s, 100 GB/s  invented" in told
    assert "rates of four of five" not in told
