"""The lab predicts a run's memory, traffic and time, at any stage, from the engine's own stage table and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.lab.planner.plan import Plan as Plan
    from zeroshard.lab.planner.plan import plan as plan

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
