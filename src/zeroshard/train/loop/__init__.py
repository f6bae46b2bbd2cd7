"""The training loop, and what watches over its steps."""
