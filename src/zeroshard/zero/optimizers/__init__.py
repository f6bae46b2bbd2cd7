"""The user's optimizers over shards: their steps, clipping, state, and averages of weights."""
