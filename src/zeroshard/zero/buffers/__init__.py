"""Flat buffers: where each parameter lies in one, its weights, its gradients, and the units that travel together."""
