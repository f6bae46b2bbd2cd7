"""Replicas that meet every H steps instead of each: local steps, DiLoCo and its streaming form."""
