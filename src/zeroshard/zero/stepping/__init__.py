"""The optimizers of an engine, and what is attached to its steps."""
