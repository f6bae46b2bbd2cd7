"""A sweep as data: its settings, and the list of cases that follows from them. Nothing here runs anything.

    repeats = 3
    [base]                                  # any settings of `zeroshard train`
    max_steps = 30
    [axes]                                  # each combination is a case; the last axis changes fastest
    strategy = ["zero0", "zero3"]
    "link.bandwidth" = ["100Mbit/s", "1Gbit/s"]
    size = [{ n_layer = 4 }, ...]           # a table sets several things at once, here of the model: see below

An axis is a setting by its dotted name. If its values are tables, they set keys of the table of that name (``model``);
if there is no such table, they are tables of settings (``{ "model.n_layer" = 4, micro_batch_size = 8 }``).

A case's name is the hash of its resolved configuration, without the settings that change no result. A sweep whose file
has changed therefore finds the runs that it shares with the sweep before.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.host.masked_addresses import masked
from zeroshard.settings.base import SHORTHANDS, Config
from zeroshard.settings.validate import by_dotted_name, fields_by_name, nearest, nested, validate
from zeroshard.train.config.config import TrainConfig, merge
from zeroshard.train.config.named_code import require_asked

CHANGES_NO_RESULT = (
    *("out", "port", "resume", "log_interval", "checkpoint_interval", "keep_checkpoints", "keep_every"),
    *("step_timeout_s", "dry_run"),
)
DIGITS = 12  # hexadecimal digits of a hash


class SweepConfig(Config):
    """Settings of `zeroshard sweep`. ``base`` and ``axes`` are raw settings of `zeroshard train`."""

    out: str = Field("sweeps/sweep", min_length=1, description="Folder of the sweep; a sweep that is there is resumed.")
    repeats: int = Field(1, ge=1, description="Runs of each case; all cases run once before any runs again.")
    retry: bool = Field(False, description="Run again what has failed before.")
    dry_run: bool = Field(False, description="Say what would run, and run nothing.")
    checkpoints: bool = Field(False, description="Keep the checkpoint that each run ends with.")

    base: dict[str, Any] = Field({}, description="Settings of every run.")
    axes: dict[str, Any] = Field({}, description="Settings that are tried, each with its list of values.")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if "out" in self.axes:
            what = "a sweep gives each run a folder of its own"
            raise UserError("axes.out", what, "leave it out, and name the sweep's by --out")
        for name, values in flat_axes(self.axes).items():
            if not values:
                raise UserError(f"axes.{name}", "has no values", "give a list of at least one")
        return self


@dataclass(frozen=True)
class Case:
    """One configuration of a sweep."""

    name: str  # hash of ``config``
    axes: Mapping[str, Any]  # its values of the sweep's axes, by dotted name
    config: TrainConfig | None  # configuration of its runs, except for the folder; None if the settings are invalid
    refusal: str = ""  # why ``config`` is None, in a line; else empty


def cases_of(sweep: SweepConfig) -> list[Case]:
    """Every combination of the axes' values, each configuration once; an invalid one is a case with a ``refusal``.

    Raises:
        UserError: an axis is not a setting, or no combination is valid.
    """
    axes = flat_axes(sweep.axes)
    known = fields_by_name(TrainConfig)
    for name, values in axes.items():
        tables = all(isinstance(value, Mapping) for value in values)
        if not tables and name not in known and name not in SHORTHANDS:
            todo = nearest(name, known, "see zeroshard train --help")
            raise UserError(f"axes.{name}", "there is no such setting", todo)
    found: dict[str, Case] = {}
    for values in itertools.product(*axes.values()):
        case = make_case(sweep.base, dict(zip(axes, values, strict=True)))
        found.setdefault(case.name, case)
    if all(case.config is None for case in found.values()):
        first = next(iter(found.values())).refusal
        raise UserError("axes", f"no case can run, the first because of {first}", "change base or axes")
    return list(found.values())


def make_case(base: Mapping[str, Any], axes: Mapping[str, Any]) -> Case:
    """The case of ``base`` with the settings of ``axes`` merged over it."""
    raw: dict[str, Any] = {"checkpoint_interval": 0}  # what is timed writes none on the way, unless it is asked to
    for table in (base, *(_nested(name, value) for name, value in axes.items())):
        raw = merge(raw, _spelled_out(table))
    try:
        config = validate(TrainConfig, raw)
        if config.dry_run:
            raise UserError("dry_run", "a sweep runs its cases", "leave it out of base, or give --dry-run to the sweep")
    except UserError as error:
        return Case(_hash(raw), dict(axes), None, str(error))
    return Case(case_name(config), dict(axes), config)


def require_asked_cases(sweep: SweepConfig, asked: Mapping[str, Any], where: object) -> None:
    """Raise UserError if a case names code that no flag of this command asks for.

    Args:
        sweep: settings of the sweep, of which some come from the file ``where``.
        asked: those that flags of this command give.
        where: the file, for the message.
    """
    of_flags = {*by_dotted_name(asked.get("base", {})), *asked.get("axes", {})}
    for case in cases_of(sweep):
        if case.config is not None:
            require_asked(case.config, of_flags, where)


def case_name(config: TrainConfig) -> str:
    """The hash of all settings that a run's result depends on."""
    facts = {name: value for name, value in config.model_dump(mode="json").items() if name not in CHANGES_NO_RESULT}
    return _hash(facts)


def flat_axes(axes: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Turn ``{"link": {"bandwidth": [...]}}`` into ``{"link.bandwidth": [...]}``; a single value becomes a list."""
    found: dict[str, list[Any]] = {}
    for name, value in axes.items():
        if isinstance(value, Mapping):
            found |= flat_axes(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = [*value] if isinstance(value, list | tuple) else [value]
    return found


def in_words(axes: Mapping[str, Any]) -> str:
    """Format a case: ``strategy zero2  link.bandwidth 1Gbit/s``; an axis of tables shows its keys, not its name."""
    words = []
    for name, value in axes.items():
        inner = " ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, Mapping) else ""
        words.append(inner or f"{name} {'as in base' if value == {} else value}")
    return masked("  ".join(words))


def _nested(name: str, value: Any) -> dict[str, Any]:
    """Turn ``link.bandwidth``, v into ``{"link": {"bandwidth": v}}``; a table that is no setting, into its contents."""
    if isinstance(value, Mapping):
        inner: dict[str, Any] = {}
        for key, each in value.items():
            inner = merge(inner, _nested(key, each))
        return {name: inner} if name in TrainConfig.model_fields else inner
    return nested({tuple(name.split(".")): value})


def _spelled_out(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``model = "NAME"`` into ``model.name = "NAME"``, so that merging a name does not replace the whole table."""
    return {
        key: {SHORTHANDS[key]: value} if key in SHORTHANDS and isinstance(value, str | int) else value
        for key, value in raw.items()
    }


def _hash(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=DIGITS // 2).hexdigest()
