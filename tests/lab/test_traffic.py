"""Lists by hand; that the engine sends them is shown in tests/budgets."""

import torch

from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.traffic import bytes_by_op, messages
from zeroshard.zero import STAGES, FlatLayout

WORLD_SIZE = 2


def _buffers(world_size=WORLD_SIZE):
    sizes = {"root": 3, "a": 10, "b": 20}
    return [
        Buffer(name, name, FlatLayout.of([("w", (size,))], world_size), torch.float32, trained=True)
        for name, size in sizes.items()
    ]


def test_the_totals_are_those_of_the_stage_table():
    total, root, last, num_micro = 136, 16, 80, 3
    assert [bytes_by_op(messages(_buffers(), STAGES[stage], num_micro=num_micro)) for stage in STAGES] == [
        {"all_reduce": total},
        {"reduce_scatter": total, "all_gather": total},
        {"reduce_scatter": num_micro * total, "all_gather": total},
        {"reduce_scatter": num_micro * total, "all_gather": num_micro * (2 * total - root - last)},
    ]


def test_what_crosses_between_groups_is_one_shard_of_the_model():
    for stage in (1, 2, 3):
        found = messages(_buffers(), STAGES[stage], num_replicas=8)
        across = [message for message in found if message.world_size == 8]
        assert bytes_by_op(across) == {"all_reduce": 136 // WORLD_SIZE}
        assert [message for message in found if message.world_size == WORLD_SIZE] == messages(_buffers(), STAGES[stage])
