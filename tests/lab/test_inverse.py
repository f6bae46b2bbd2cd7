import pytest

from lab.small_plans import SMALL, small_gpu
from zeroshard.lab.planner.inverse import fewest
from zeroshard.lab.planner.planner import planner_for


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("optimizer", "state_format", "mebibytes"),
    [
        ("adamw", "fp32", 6),
        ("adamw8bit", "fp32", 4),
        ("adamw", "int8", 4),
        ("flash-adamw", "fp32", 2),
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
