"""Replicas that synchronise ("meet") every H steps instead of every step: DiLoCo and its streaming form."""
