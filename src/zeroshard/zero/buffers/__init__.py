"""Flat buffers: the layout of parameters in them, their weights and gradients, and the units that are sharded."""
