"""Optimizers that look at whole tensors: which classes do, and the layout in which each tensor lies on one rank."""
