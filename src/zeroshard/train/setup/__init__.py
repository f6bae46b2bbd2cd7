"""From settings to a run: ranks, data, model, optimizer, strategy."""
