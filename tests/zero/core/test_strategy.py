import pytest

from zeroshard.zero.core.strategy import STAGES, Placement, ShardingStrategy, resolve_strategy

REPLICATE, SHARD = Placement.REPLICATE, Placement.SHARD


def test_each_stage_shards_one_column_more():
    rows = [(row.params, row.grads, row.optim) for row in STAGES.values()]
    assert rows == [
        (REPLICATE, REPLICATE, REPLICATE),
        (REPLICATE, REPLICATE, SHARD),
        (REPLICATE, SHARD, SHARD),
        (SHARD, SHARD, SHARD),
    ]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (("shard", "replicate", "replicate"), "params"),
        (("shard", "replicate", "shard"), "params"),
        (("shard", "shard", "replicate"), "grads"),
        (("replicate", "shard", "replicate"), "grads"),
    ],
)
def test_what_shards_to_the_left_of_something_whole_is_refused_by_name(columns, named):
    with pytest.raises(ValueError, match=f"^{named}: sharded .* need"):
        ShardingStrategy(*columns)


def test_placements_may_be_given_by_their_values():
    assert ShardingStrategy("replicate", "shard", "shard") == STAGES[2]
    with pytest.raises(ValueError, match="optim: 'halved' is no placement; choose"):
        ShardingStrategy("replicate", "replicate", "halved")


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_a_number_of_ranks_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=r"^secondary_shard_size must be at least 1, got "):
        ShardingStrategy(SHARD, SHARD, SHARD, secondary_shard_size=size)


def test_a_word_is_not_taken_for_true():
    with pytest.raises(ValueError, match=r"^reshard_after_forward: 'no' is not a bool; give True or False"):
        ShardingStrategy(SHARD, SHARD, SHARD, reshard_after_forward="no")


def test_a_stage_is_a_number_or_a_row():
    own = ShardingStrategy(SHARD, SHARD, SHARD, reshard_after_forward=False)
    assert resolve_strategy(own) is own
    assert resolve_strategy(1) is STAGES[1]
    for unknown in (4, -1, True, "3", None):
        with pytest.raises(ValueError, match="is not a ZeRO stage; choose 0, 1, 2 or 3"):
            resolve_strategy(unknown)
