"""What optimizers do to pieces of tensors, held against one process."""
