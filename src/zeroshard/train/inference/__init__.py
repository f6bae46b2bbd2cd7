"""Uses a trained model: validation loss and text generation."""
