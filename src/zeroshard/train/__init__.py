"""The trainer: configuration, the one training loop, evaluation, generation, records."""
