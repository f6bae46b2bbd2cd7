"""Settings as flags in words, ``--tiles auto``: what a plan advises, and what is added to settings that were given."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from zeroshard.settings.base import SHORTHANDS, Config
from zeroshard.settings.validate import by_path, nested, validate

Settings = TypeVar("Settings", bound=Config)


def with_flags(config: Settings, flags: Iterable[str]) -> Settings:
    """The settings with those of ``flags``, each as ``--tiles auto`` or ``--checkpoint-async=false``.

    Raises:
        UserError: they do not go together.
    """
    given = by_path(config.model_dump(exclude_unset=True))
    return validate(type(config), nested(given | {path_of(flag): _split(flag)[1] for flag in flags}))


def path_of(flag: str) -> tuple[str, ...]:
    """The setting that a flag sets: ``("model", "activation_checkpointing")``."""
    name = _split(flag)[0].removeprefix("--").replace("-", "_")
    return (name, SHORTHANDS[name]) if name in SHORTHANDS else tuple(name.split("."))


def _split(flag: str) -> list[str]:
    return re.split("[ =]", flag, maxsplit=1)
