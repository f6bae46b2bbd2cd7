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


def test_placements_may_be_given_by_their_values():
    assert ShardingStrategy("replicate", "shard", "shard") == STAGES[2]


def test_a_stage_is_a_number_or_a_row():
    own = ShardingStrategy(SHARD, SHARD, SHARD, reshard_after_forward=False)
    assert resolve_strategy(own) is own
    assert resolve_strategy(1) is STAGES[1]
