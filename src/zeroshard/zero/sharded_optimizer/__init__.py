"""`ShardedOptimizer`: the optimizer's state alone is sharded, beside DDP or a loop of one's own."""
