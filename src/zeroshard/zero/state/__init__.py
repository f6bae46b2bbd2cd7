"""Training state by the model's own names: shards for checkpoints, full state dicts, and changes of the stage."""
