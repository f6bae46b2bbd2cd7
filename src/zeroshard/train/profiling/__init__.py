"""The hardware's limits, and measurements of a run against them: time, overlap, memory, FLOPs, traces."""
