"""Types of settings whose choices are the names of a table, read when a value is checked: a new row is a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from zeroshard.comm.registry import COMMUNICATORS
from zeroshard.data.registry import SOURCES
from zeroshard.lazily import is_address
from zeroshard.models.presets import PRESETS
from zeroshard.parallel.registry import STRATEGIES, strategies_with


@dataclass(frozen=True)
class Names:
    """Beside a setting's type: the names that a shell may complete, as they are now."""

    now: Callable[[], Iterable[str]]


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Refuses what is neither one of ``names`` nor of the form ``module:name``, in the words for a `Literal`."""

    def check(value: str) -> str:
        known = tuple(names())
        if value not in known and not is_address(value):
            raise PydanticKnownError("literal_error", {"expected": ", ".join((*known, "module:name"))})
        return value

    return AfterValidator(check)


def communicators(*others: str) -> Callable[[], tuple[str, ...]]:
    """What lists ``others`` and the names of all communicators."""
    return lambda: (*others, *COMMUNICATORS)


def _strategies() -> tuple[str, ...]:
    return ("auto", *STRATEGIES)


def _evaluating() -> tuple[str, ...]:
    return ("none", *strategies_with("evaluates"))


StrategyName = Annotated[str, Names(_strategies), one_of(_strategies)]
EvaluatingName = Annotated[str, Names(_evaluating), one_of(_evaluating)]
CommName = Annotated[str, Names(communicators("auto")), one_of(communicators("auto"))]
# These two are checked when a model is made and when a source is opened: `model_config`, `check_source`.
ModelName = Annotated[str, Names(lambda: PRESETS)]
SourceName = Annotated[str, Names(lambda: SOURCES)]
