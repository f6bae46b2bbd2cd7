"""Checkpoints: sharded, atomic, checksummed, readable at any stage and world size (see `api`)."""

from zeroshard.checkpoint.api import Shardable, latest, load, open_manifest, save
from zeroshard.checkpoint.store import CheckpointReader
from zeroshard.checkpoint.whole import consolidate

__all__ = ["CheckpointReader", "Shardable", "consolidate", "latest", "load", "open_manifest", "save"]
