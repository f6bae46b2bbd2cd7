"""Uses a trained model: validation loss, text generation, and tasks of lm-evaluation-harness."""
