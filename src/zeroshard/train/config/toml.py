"""Read and write settings as TOML: the standard library reads it, tomli-w writes it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zeroshard.errors import UserError
from zeroshard.regular_files import read_text, toml_of


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
    """Return ``config`` as TOML text, from which `load_config` reads an equal configuration."""
    import tomli_w

    return tomli_w.dumps(config.model_dump())
