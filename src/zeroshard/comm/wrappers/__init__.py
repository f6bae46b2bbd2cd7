"""Communicators that wrap another one: they measure it, slow it down, watch for faults, or block."""
