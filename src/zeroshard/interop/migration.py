"""What somebody else's settings became: a run of ours in the making, and the table that says so key by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import tomli_w

from zeroshard.columns import columns
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.validate import validate

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
        lines += [f"# {line}".rstrip() for line in columns(cells)]
        return "\n".join(lines) + "\n\n" + tomli_w.dumps(self.values)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
