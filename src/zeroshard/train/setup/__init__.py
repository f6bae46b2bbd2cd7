"""Builds a run from its settings: ranks, data, model, optimizer, strategy."""
