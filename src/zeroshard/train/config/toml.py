"""Read and write settings as TOML: the standard library reads it, tomli-w writes it.

A run's ``config.toml`` keeps two things apart: first what was given, by a file or flags, then in the table `RESOLVED`
what every other setting became, by default or derived from others. `load_config` reads both, for those who want the
settings of that run; `read_given` reads what a new run starts from. A default that was written down would be a choice
for that run: 20 steps of warm-up in a run of 30 would be refused in one of 10, where 20 not given becomes 1. A file
without that table, as users write them, has given all that it says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import read_text, toml_of
from zeroshard.settings.validate import by_path, nested, validate
from zeroshard.train.config.config import TrainConfig, merge

RESOLVED = "resolved"
_ABOUT_GIVEN = "What was given for this run. `zeroshard train --config THIS_FILE` starts from these settings."
_ABOUT_RESOLVED = "What every other setting of this run was, by default or derived; to choose one, write it above."
# Settings that follow from others if they are not given, so that what they were holds for that run alone.
DERIVED = ("lr", "min_lr", "warmup_steps", "eval_batches")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the raw values from a TOML file.

    Raises:
        UserError: the file is missing, unreadable or not TOML; a syntax error names its line and column.
    """
    try:
        return toml_of(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError("--config", f"{path} does not parse: {error}", "correct that line") from None
    except FileNotFoundError:
        raise UserError("--config", f"there is no file {path}", "give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise UserError("--config", f"{path} is not UTF-8 text", "give the path of a TOML file") from None
    except RecursionError:
        raise UserError("--config", f"{path} is nested too deeply", "give the path of a TOML file") from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise UserError("--config", f"{path} does not parse: {error}", "correct that number") from None
    except OSError as error:
        raise UserError("--config", f"cannot read {path} ({error.strerror})", "give a readable file") from None


def load_config(path: str | Path) -> TrainConfig:
    """Load a training configuration from a TOML file, such as the ``config.toml`` of a run folder."""
    return validate(TrainConfig, as_resolved(read_toml(path)))


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
    given = by_path(_given(raw))
    others = by_path({key: value for key, value in resolved.items() if key not in DERIVED})
    now = by_path(validate(TrainConfig, nested(given)).model_dump(mode="json"))
    changed = {path: value for path, value in others.items() if value != now.get(path) and now.get(path) != "auto"}
    # A given name may stand for a table, as model = "gpt2-124m".
    return nested(given | {path: changed[path] for path in changed if not any(_overlap(path, each) for each in given)})


def all_settings(config: TrainConfig) -> str:
    """Return ``config`` as TOML text for a program that starts a run: each setting but those that will follow again."""
    skipped = {name for name in DERIVED if name not in config.model_fields_set}
    return tomli_w.dumps(config.model_dump(exclude=skipped))


def dump_toml(config: BaseModel) -> str:
    """Return ``config`` as TOML text: what was given, then what the rest became; `load_config` reads an equal one."""
    given = by_path(config.model_dump(exclude_unset=True))
    rest = nested({path: value for path, value in by_path(config.model_dump()).items() if path not in given})
    resolved = f"\n# {_ABOUT_RESOLVED}\n{tomli_w.dumps({RESOLVED: rest})}" if rest else ""
    return f"# {_ABOUT_GIVEN}\n{tomli_w.dumps(nested(given))}{resolved}"


def as_resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a file that `dump_toml` wrote, and any other file's as they are."""
    return merge(raw[RESOLVED], _given(raw)) if isinstance(raw.get(RESOLVED), Mapping) else dict(raw)


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key != RESOLVED}


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether two settings are the same one, or one of them is a table that has the other."""
    both = min(len(one), len(other))
    return one[:both] == other[:both]
