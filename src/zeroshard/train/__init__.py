"""The trainer: configuration, run setup, the training loop, run state (checkpoints, resuming) and records."""
