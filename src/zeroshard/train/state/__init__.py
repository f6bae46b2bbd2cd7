"""State of a run on disk: checkpoints, resuming, initial weights, and the lock on the run folder."""
