"""Types of settings whose choices are the names in a registry: strategies, communicators, models, data sources.

The names are read from the registry when a value is checked, so a row added to the registry is a valid choice at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from zeroshard.comm.registry import COMMUNICATORS
from zeroshard.host.lazily import is_address
from zeroshard.parallel.registry import STRATEGIES, strategies_with


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Return a validator that accepts ``names`` and ``module:name``; its error is the one that a `Literal` gives."""
    return AfterValidator(partial(_check, names))


def names_among(metadata: Iterable[Any]) -> tuple[str, ...] | None:
    """The names that `one_of` accepts, of a field with this metadata; None without one."""
    found = (each.func for each in metadata if isinstance(each, AfterValidator))
    return next((tuple(check.args[0]()) for check in found if isinstance(check, partial)), None)


def _check(names: Callable[[], Iterable[str]], value: str) -> str:
    known = tuple(names())
    if value not in known and not is_address(value):
        raise PydanticKnownError("literal_error", {"expected": ", ".join((*known, "module:name"))})
    return value


def communicators(*others: str) -> Callable[[], tuple[str, ...]]:
    """Return a function that lists ``others`` and the names of all registered communicators."""
    return lambda: (*others, *COMMUNICATORS)


def _evaluating() -> tuple[str, ...]:
    return ("none", *strategies_with("evaluates"))


StrategyName = Annotated[str, one_of(lambda: STRATEGIES)]
EvaluatingName = Annotated[str, one_of(_evaluating)]
CommName = Annotated[str, one_of(communicators("auto"))]
