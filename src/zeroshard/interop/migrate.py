"""``zeroshard import-config``: somebody else's settings as ours, and what became of each of them.

    zeroshard import-config nanogpt config/train_gpt2.py --batch_size=8 > run.toml
    zeroshard import-config deepspeed ds_config.json > run.toml

What is printed is TOML that `zeroshard train --config` takes, under a table of comments: each of their keys with what
it became, and why where that is not the same. Files are read and never executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from zeroshard.errors import ExitStatus, UserError
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import toml_of
from zeroshard.train.config.validate import nearest, validate

Fate = Literal["mapped", "changed", "ignored"]


@dataclass(frozen=True)
class Row:
    """One of their keys.

    Attributes:
        key: theirs, with dots.
        value: theirs.
        fate: mapped: means the same here. changed: means something else, see why. ignored: means nothing here.
        ours: keys of ours that it set.
        why: what is to be known.
    """

    key: str
    value: Any
    fate: Fate
    ours: str = ""
    why: str = ""


@dataclass
class Migration:
    """Settings of ours in the making, and the table of how they came about."""

    source: str
    rows: list[Row] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def set(self, ours: str, value: Any) -> None:
        """One of our keys, with dots."""
        table = self.values
        *path, leaf = ours.split(".")
        for name in path:
            table = table.setdefault(name, {})
        table[leaf] = value

    def map(self, key: str, value: Any, ours: Mapping[str, Any], why: str = "", *, same: bool = True) -> None:
        """``key`` became ``ours``; where it does not mean the ``same``, ``why`` says so."""
        for name, ours_value in ours.items():
            self.set(name, ours_value)
        self.rows.append(Row(key, value, "mapped" if same else "changed", ", ".join(ours), why))

    def ignore(self, key: str, value: Any, why: str) -> None:
        """``key`` became nothing."""
        self.rows.append(Row(key, value, "ignored", "", why))

    def config(self) -> TrainConfig:
        """The run that it makes; a UserError where values do not go together."""
        return validate(TrainConfig, self.values)

    def text(self) -> str:
        """The table and the TOML."""
        lines = [f"# From {self.source}, by `zeroshard import-config`.", "#"]
        cells = [("", "theirs", "value", "ours", "")]
        cells += [(row.fate, row.key, _short(row.value), row.ours, row.why) for row in self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        for row in cells:
            padded = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            lines.append(f"# {padded}  {row[4]}".rstrip())
        return "\n".join(lines) + "\n\n" + toml_of(self.values)


def run_import_config(words: Sequence[str]) -> int:
    """``KIND FILE [--key=value ...]``: print what it becomes; returns the exit status.

    Raises:
        UserError: no such kind, no such file, or one that cannot be read; values that do not go together.
    """
    from zeroshard.interop.deepspeed import read_deepspeed
    from zeroshard.interop.nanogpt import read_nanogpt

    kinds: dict[str, Callable[[Sequence[str]], Migration]] = {"nanogpt": read_nanogpt, "deepspeed": read_deepspeed}
    if not words or words[0] not in kinds:
        given = words[0] if words else "KIND"
        todo = nearest(given, kinds, f"choose one of {', '.join(kinds)}")
        raise UserError("import-config", f"{given!r} is none of what is read", todo)
    migration = kinds[words[0]](words[1:])
    migration.config()
    print(migration.text(), end="")
    return int(ExitStatus.OK)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
