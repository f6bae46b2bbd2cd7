"""Predicts a training step as data: its allocations, operations and collectives, and its time."""
