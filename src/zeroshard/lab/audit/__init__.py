"""What strategies and optimizers do, held against one process."""
