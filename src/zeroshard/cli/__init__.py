"""The `zeroshard` command: its verbs, its flags, and what it looks up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.cli.command import main as main
    from zeroshard.cli.verbs import VERBS as VERBS

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
