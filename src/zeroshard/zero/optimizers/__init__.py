"""The user's optimizers over shards: their steps, operands and states."""
