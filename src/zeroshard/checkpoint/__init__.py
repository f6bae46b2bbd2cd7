"""Checkpoints: sharded, atomic and checksummed; any stage and world size can load them (see `api`)."""

from zeroshard.checkpoint.api import (
    Choice,
    Rejected,
    Saveable,
    Shardable,
    load,
    newest_valid,
    open_manifest,
    read_manifest,
    save,
)
from zeroshard.checkpoint.background import BackgroundSaver, Saved
from zeroshard.checkpoint.consolidated import consolidate
from zeroshard.checkpoint.folder import BEST, Found, find, is_complete, latest, name_best, prune, set_aside, step_name
from zeroshard.checkpoint.manifest import Manifest, parsed_once
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.verify import Damage, verify

__all__ = [
    "BEST",
    "BackgroundSaver",
    "CheckpointReader",
    "Choice",
    "Damage",
    "Found",
    "Manifest",
    "Rejected",
    "Saveable",
    "Saved",
    "Shardable",
    "consolidate",
    "find",
    "is_complete",
    "latest",
    "load",
    "name_best",
    "newest_valid",
    "open_manifest",
    "parsed_once",
    "prune",
    "read_manifest",
    "save",
    "set_aside",
    "step_name",
    "verify",
]
