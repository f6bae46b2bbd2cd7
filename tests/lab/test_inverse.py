import pytest

from lab.small_plans import SMALL, small_gpu
from zeroshard.lab.planner.inverse import fewest, largest_micro_batch, lowest_bandwidth, most
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.predict.hardware import Link


@pytest.mark.parametrize(
    ("optimizer", "state_format", "mebibytes"),
    [
        ("adamw", "fp32", 6),
        ("adamw8bit", "fp32", 4),
        ("adamw", "int8", 4),
        ("flashadamw", "fp32", 2),
        ("muon8bit", "fp32", 3),
    ],
)
def test_one_gpu_too_few_is_answered_with_how_many(optimizer, state_format, mebibytes):
    """Blocks of 8-bit states are padded on many GPUs: the answer fits even where the largest world does not."""
    gpu = small_gpu(mebibytes * 2**20)
    planner = planner_for(
        "gpt2-demo", world_size=1, gpu=gpu, overrides=SMALL, optimizer=optimizer, state_format=state_format
    )
    needed = fewest(planner, (0, 1, 2, 3), 1)
    assert needed.value is not None
    for world_size, fits in ((1, False), (int(needed.value) - 1, False), (int(needed.value), True)):
        found = planner.on(world_size=world_size)
        assert any(found.row(stage, 1).fits for stage in range(4)) == fits


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    planner = planner_for("gpt2-demo", world_size=4, gpu=small_gpu(50 * 2**20), overrides=SMALL)
    top = int(largest_micro_batch(planner, 2).value)
    assert planner.row(2, top).fits
    assert not planner.row(2, top + 1).fits


def _on_a_network(bytes_per_s=1e9, **changes):
    link = Link("net", 5e-6, bytes_per_s, "invented")
    return planner_for("gpt2-demo", world_size=16, gpu=small_gpu(10**9), network=link, overrides=SMALL, **changes)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_at_the_lowest_bandwidth_a_stage_keeps_nine_tenths_of_its_speed(stage):
    planner = _on_a_network()
    found = lowest_bandwidth(planner, stage, 4).value
    fast = _on_a_network(1e13).row(stage, 4).tokens_per_s
    assert _on_a_network(found).row(stage, 4).tokens_per_s >= 0.9 * fast
    assert _on_a_network(0.97 * found).row(stage, 4).tokens_per_s < 0.9 * fast


@pytest.mark.parametrize(("border", "limit", "found"), [(0, 8, 0), (5, 8, 5), (8, 8, 8), (100, 8, 8), (100, 9, 9)])
def test_a_search_ends_at_its_limit(border, limit, found):
    assert most(lambda number: number <= border, limit) == found
