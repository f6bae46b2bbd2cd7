"""The trainer: configuration, run setup, the training loop, run state (checkpoints, resuming) and records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.train.records.records import Callback as Callback
    from zeroshard.train.records.records import StepRecord as StepRecord

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
