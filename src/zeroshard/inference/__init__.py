"""A trained model at work: validation loss, text, benchmarks of others."""
