"""Communicators around another one: they measure, slow down, watch over, or block."""
