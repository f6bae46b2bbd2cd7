"""Training state under ordinary names: pieces for checkpoints, whole tensors, other stages."""
