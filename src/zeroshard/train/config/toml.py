"""Settings as TOML, read and written; Python reads it and does not write it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zeroshard.errors import UserError
from zeroshard.regular_files import read_text


def read_toml(path: str | Path) -> dict[str, Any]:
    """The raw values in a TOML file; a syntax error names its line and column."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError("--config", f"{path} does not parse: {error}", "correct that line") from None
    except FileNotFoundError:
        raise UserError("--config", f"there is no file {path}", "give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise UserError("--config", f"{path} is not UTF-8 text", "give the path of a TOML file") from None
    except RecursionError:
        raise UserError("--config", f"{path} is nested too deeply", "give the path of a TOML file") from None
    except ValueError as error:  # of a number: more digits than Python converts
        raise UserError("--config", f"{path} does not parse: {error}", "correct that number") from None
    except OSError as error:
        raise UserError("--config", f"cannot read {path} ({error.strerror})", "give a readable file") from None


def dump_toml(config: BaseModel) -> str:
    """TOML text that `load_config` reads back to an equal configuration."""
    return toml_of(config.model_dump())


def toml_of(values: Mapping[str, Any]) -> str:
    """TOML text of values and of tables one level deep."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in values.items() if key not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml_value(value: bool | int | float | str | Sequence[str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for surrogate pairs (avoided) and a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
