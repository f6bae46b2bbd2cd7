"""Which settings of a run's ``config.toml`` another run starts from: those that were given, and no defaults.

A default that was written down would be a choice for the next run: 20 steps of warm-up in a run of 30 would be refused
in one of 10, where 20 not given becomes 1. So `zeroshard.train.config.toml.dump_toml` keeps the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import RESOLVED, read_toml
from zeroshard.train.config.validate import validate

# Settings that follow from others if they are not given, so that what they were holds for that run alone.
DERIVED = ("lr", "min_lr", "warmup_steps", "eval_batches")


def read_given(path: str) -> dict[str, Any]:
    """Return the raw settings of a TOML file from which a new run starts.

    Of a run's ``config.toml`` these are the given ones, and of the others those that are no default now: they were
    changed by hand, or were the default of another version. What ``auto`` became on that machine and what follows from
    other settings (`DERIVED`) is left out. Any other file has given all that it says.

    Raises:
        UserError: the file cannot be read, or a given setting is wrong.
    """
    raw = read_toml(path)
    resolved = raw.get(RESOLVED)
    if not isinstance(resolved, Mapping):
        return raw
    given = {key: value for key, value in raw.items() if key != RESOLVED}
    others = {key: value for key, value in resolved.items() if key not in DERIVED}
    return _with_no_defaults(given, others, validate(TrainConfig, given).model_dump(mode="json"))


def all_settings(config: TrainConfig) -> str:
    """Return ``config`` as TOML text for a program that starts a run: each setting but those that will follow again."""
    import tomli_w

    skipped = {name for name in DERIVED if name not in config.model_fields_set}
    return tomli_w.dumps(config.model_dump(exclude=skipped))


def _with_no_defaults(given: Mapping[str, Any], others: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with those of ``others`` that it has not and that differ from ``now``, at any depth."""
    found = dict(given)
    for key, value in others.items():
        if isinstance(value, Mapping) and isinstance(now.get(key), Mapping):
            if isinstance(found.get(key, {}), Mapping):  # not a name in place of a table, as model = "gpt2-124m"
                inner = _with_no_defaults(found.get(key, {}), value, now[key])
                found |= {key: inner} if inner else {}
        elif key not in found and value != now.get(key) and now.get(key) != "auto":
            found[key] = value
    return found
