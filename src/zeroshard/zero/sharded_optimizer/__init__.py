"""`ShardedOptimizer`: shards the optimizer's state alone, for use with DDP or a hand-written training loop."""
