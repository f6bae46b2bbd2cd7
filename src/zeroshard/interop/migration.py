"""``zeroshard import-config``: convert another program's settings to ours, and report what each of them became.

    zeroshard import-config nanogpt config/train_gpt2.py --batch_size=8 > run.toml
    zeroshard import-config deepspeed ds_config.json > run.toml

It prints TOML for `zeroshard train --config`, below a table in comments: each key of the other program, what it became,
and why. What is ignored is printed on stderr too. Files are parsed and never executed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tomli_w

from zeroshard.columns import columns
from zeroshard.errors import ExitStatus, UserError, shown
from zeroshard.lazily import loaded
from zeroshard.sizes import LARGEST
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.validate import nearest, nested, validate

# Settings of ours; or these and a remark, if they mean something else; or only the reason why a key has no effect here.
Became = Mapping[str, Any] | tuple[Mapping[str, Any], str] | str
Becomes = str | Callable[[Any, Mapping[str, Any]], Became]  # our key, or a function of the value and all settings
Kind = tuple[Callable[[Any], bool], str]  # which values a key takes, and their name


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number of at least 0 that fits into 64 bits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST


def is_count(value: Any) -> bool:
    """Whether ``value`` is such a number without a fraction."""
    return is_number(value) and value == int(value)


COUNT: Kind = is_count, "a whole number of at least 0"
NUMBER: Kind = is_number, "a number of at least 0"
SWITCH: Kind = lambda value: isinstance(value, int) and value in (0, 1), "true or false"
TEXT: Kind = lambda value: isinstance(value, str), "text"


class Row(NamedTuple):
    """A line of the table: a key of the other program, and the keys of ours that it set; ``why`` may be empty.

    ``fate`` is ``mapped``, ``ignored``, or ``default`` if it was left out and the value is the other program's.
    """

    key: str
    value: Any
    fate: str
    ours: str
    why: str


@dataclass
class Migration:
    """Our settings by dotted name, which are filled in key by key, and the table of how they came about."""

    source: str
    ours: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, key: str, value: Any, found: Became, *, is_default: bool = False) -> None:
        """Set and record what ``key`` became."""
        ours, why = ({}, found) if isinstance(found, str) else found if isinstance(found, tuple) else (found, "")
        self.ours |= ours
        fate = "default" if is_default else "ignored" if isinstance(found, str) else "mapped"
        self.rows.append(Row(key, value, fate, ", ".join(ours), why))

    @property
    def values(self) -> dict[str, Any]:
        """Our settings as nested tables."""
        return nested({tuple(name.split(".")): value for name, value in self.ours.items()})

    def lines(self) -> list[str]:
        """Return lines for the console about what has no effect here, one for each reason; the table says it too."""
        keys: dict[str, list[str]] = {}
        for row in self.rows:
            if row.fate == "ignored":
                keys.setdefault(row.why, []).append(row.key)
        return [f"ignored: {', '.join(names)} ({why})" for why, names in keys.items()]

    def config(self) -> TrainConfig:
        """Return the configuration of a run with these settings; raises UserError if values contradict each other."""
        return validate(TrainConfig, self.values)

    def text(self) -> str:
        """Return the table, in comments, and the settings as TOML."""
        cells = [("", "theirs", "value", "ours", "")]
        cells += [(row.fate, row.key, shown(row.value, 40), row.ours, row.why) for row in self.rows]
        table = "\n".join(f"# {line}".rstrip() for line in columns(cells))
        return f"# From {self.source}, by `zeroshard import-config`.\n#\n{table}\n\n{tomli_w.dumps(self.values)}"


def require_kind(key: str, value: Any, kind: Kind) -> None:
    """Raise UserError if ``value`` is not of ``kind``."""
    fits, name = kind
    if not fits(value):
        raise UserError(key, f"{shown(value, 80)} is not {name}", f"give {name}")


def became(value: Any, theirs: Mapping[str, Any], becomes: Becomes) -> Became:
    """Return what a key with this value becomes."""
    return {becomes: value} if isinstance(becomes, str) else becomes(value, theirs)


KINDS = {  # where the reader of each program's settings is
    "nanogpt": ("zeroshard.interop.nanogpt", "read_nanogpt"),
    "deepspeed": ("zeroshard.interop.deepspeed", "read_deepspeed"),
}


def run_import_config(words: Sequence[str]) -> int:
    """Convert the settings in ``KIND FILE [--key=value ...]``, print the result, and return the exit status.

    Raises:
        UserError: there is no such kind or file, the file cannot be read, or values contradict each other.
    """
    if not words or words[0] not in KINDS:
        what = f"{words[0]!r} cannot be imported" if words else "the name of the other program is missing"
        todo = nearest(words[0] if words else "", KINDS, f"choose one of {', '.join(KINDS)}")
        raise UserError("import-config", what, todo)
    migration = loaded(*KINDS[words[0]])(words[1:])
    migration.config()
    print(migration.text(), end="")
    for line in migration.lines():
        print(line, file=sys.stderr)
    return int(ExitStatus.OK)
