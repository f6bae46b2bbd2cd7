"""Code that settings name: a ``module:name``, and the Python files of an ``hf:`` model (``model.trust_remote_code``).

Settings come from flags, which the user has written, and from data: ``config.toml`` of a run folder, a file for
``--config``, the configuration in a checkpoint. Whoever sends such a file would otherwise decide which code runs here.
So a name of code in data is compared with other names and never resolved. The code runs if a flag of the command that
is running asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Any

from pydantic import BaseModel

from zeroshard.comm.registry import COMMUNICATORS
from zeroshard.data.registry import SOURCES, is_hub_name
from zeroshard.host.errors import UserError, shown
from zeroshard.host.lazily import is_address
from zeroshard.models.hugging_face.folder import is_hugging_face
from zeroshard.models.presets import PRESETS
from zeroshard.parallel.registry import STRATEGIES
from zeroshard.settings.validate import by_dotted_name

TRUST = "model.trust_remote_code"
CALLBACK = "callback"  # classes, each as module:Class
_TABLES: Mapping[str, Container[str]] = {
    "model.name": PRESETS,
    "data.source": SOURCES,
    "strategy": STRATEGIES,
    "comm": COMMUNICATORS,
}


def names_code(field: str, value: Any) -> bool:
    """Whether the value of the setting ``field`` (a dotted name) makes code run that is not part of zeroshard."""
    if field in (TRUST, CALLBACK):
        return bool(value)
    known = _TABLES.get(field)
    if known is None or not isinstance(value, str) or value in known or not is_address(value):
        return False
    return not (is_hugging_face(value) if field == "model.name" else field == "data.source" and is_hub_name(value))


def code_in(settings: BaseModel | Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that name code, by dotted name, with what they name; nothing is imported."""
    values = settings.model_dump() if isinstance(settings, BaseModel) else settings
    named = {field: value for field, value in by_dotted_name(values).items() if names_code(field, value)}
    return {field: " ".join(value) if field == CALLBACK else str(value) for field, value in named.items()}


def flags_for_code(settings: BaseModel) -> list[str]:
    """Return flags that ask for the code that ``settings`` name, for the command line of a child process."""
    words: list[str] = []
    for field, value in code_in(settings).items():
        words += [_flag(field)] if field == TRUST else [_flag(field), *value.split()]
    return words


def require_asked(settings: BaseModel | Mapping[str, Any], asked: Collection[str], where: object) -> None:
    """Raise UserError if ``settings`` name code that no flag of this command, of those ``asked``, asks for.

    ``where``: the file that the other settings come from, for the message.
    """
    for field, value in code_in(settings).items():
        if field not in asked:
            todo = f"add {_flag(field)}" + ("" if field == TRUST else f" {shown(value)}")
            raise _not_run(field, value, where, f"{todo} to this command where you trust it")


def require_trust(model: BaseModel | Mapping[str, Any], where: object, *, trusted: bool) -> None:
    """Raise UserError if the table ``model`` of a run's settings, from ``where``, names code that is not trusted."""
    values = model.model_dump() if isinstance(model, BaseModel) else dict(model)
    for field, value in code_in({"model": values}).items():
        if not trusted:
            raise _not_run(field, value, where, f"add {_flag(TRUST)} to this command where you trust it")


def _not_run(field: str, value: str, where: object, todo: str) -> UserError:
    named = "asks for a model's own Python files" if field == TRUST else f"names the code {shown(value)}"
    return UserError(field, f"{where} {named}, and code that a file names is not run unasked", todo)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
