"""Read and write settings as TOML: the standard library reads it, tomli-w writes it.

A run's ``config.toml`` keeps two things apart: first what was given, by a file or flags, then in the table `RESOLVED`
what every other setting became, by default or derived from others. `as_resolved` reads both, for those who want the
settings of that run; `zeroshard.train.config.run_file.read_given` reads what a new run starts from. A file without that
table, as users and earlier versions write them, has given all that it says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zeroshard.errors import UserError
from zeroshard.regular_files import read_text, toml_of

RESOLVED = "resolved"
_ABOUT_GIVEN = "What was given for this run. `zeroshard train --config THIS_FILE` starts from these settings."
_ABOUT_RESOLVED = "What every other setting of this run was, by default or derived; to choose one, write it above."


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


def dump_toml(config: BaseModel) -> str:
    """Return ``config`` as TOML text: what was given, then what the rest became; `load_config` reads an equal one."""
    import tomli_w

    given = config.model_dump(exclude_unset=True)
    rest = _without(config.model_dump(), given)
    resolved = f"\n# {_ABOUT_RESOLVED}\n{tomli_w.dumps({RESOLVED: rest})}" if rest else ""
    return f"# {_ABOUT_GIVEN}\n{tomli_w.dumps(given)}{resolved}"


def as_resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a file that `dump_toml` wrote, and any other file's as they are."""
    given = {key: value for key, value in raw.items() if key != RESOLVED}
    return _filled(given, raw[RESOLVED]) if isinstance(raw.get(RESOLVED), Mapping) else dict(raw)


def _without(table: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``table`` that ``given`` has not, at any depth."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in given:
            found[key] = value
        elif isinstance(value, Mapping) and isinstance(given[key], Mapping):
            inner = _without(value, given[key])
            found |= {key: inner} if inner else {}
    return found


def _filled(given: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with the entries of ``rest`` that it has not, at any depth."""
    found = {**rest, **given}
    for key, value in rest.items():
        if isinstance(value, Mapping) and isinstance(given.get(key), Mapping):
            found[key] = _filled(given[key], value)
    return found
