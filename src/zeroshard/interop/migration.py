"""The result of converting another program's settings: ours, and a table of what each key became."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import tomli_w

from zeroshard.columns import columns
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.validate import validate

Fate = Literal["mapped", "changed", "ignored", "default"]


@dataclass(frozen=True)
class Row:
    """What one key of the other program became.

    Attributes:
        key: the other program's key, with dots.
        value: the key's value there.
        fate: ``mapped`` if it means the same here; ``changed`` if it means something else, see ``why``; ``ignored`` if
            it has no effect here; ``default`` if the file leaves it out, and the value is the other program's.
        ours: the keys of ours that it set.
        why: an explanation for the user; may be empty.
    """

    key: str
    value: Any
    fate: Fate
    ours: str = ""
    why: str = ""


@dataclass
class Migration:
    """Our settings, which are filled in key by key, and the table of how they came about.

    Attributes:
        source: the other program and its file.
        rows: the table.
        values: our settings.
        left_out: keys that the user did not give; `told` does not mention them.
    """

    source: str
    rows: list[Row] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    def set(self, ours: str, value: Any) -> None:
        """Set one of our keys, given with dots."""
        table = self.values
        *path, leaf = ours.split(".")
        for name in path:
            table = table.setdefault(name, {})
        table[leaf] = value

    def map(self, key: str, value: Any, ours: Mapping[str, Any], why: str = "", *, same: bool = True) -> None:
        """Set ``ours``, and record that ``key`` became them; unless ``same``, ``why`` explains the difference."""
        for name, ours_value in ours.items():
            self.set(name, ours_value)
        self.rows.append(Row(key, value, "mapped" if same else "changed", ", ".join(ours), why))

    def ignore(self, key: str, value: Any, why: str) -> None:
        """Record that ``key`` has no effect here, and ``why``."""
        self.rows.append(Row(key, value, "ignored", "", why))

    def default(self, key: str, value: Any, ours: Mapping[str, Any], why: str) -> None:
        """Set ``ours``, because the file leaves ``key`` out and the other program then takes ``value``."""
        for name, ours_value in ours.items():
            self.set(name, ours_value)
        self.rows.append(Row(key, value, "default", ", ".join(ours), why))

    def told(self) -> list[str]:
        """Return lines for the console about what has no effect here, one for each reason; the table says it too."""
        keys: dict[str, list[str]] = {}
        for row in self.rows:
            if row.fate == "ignored" and row.key not in self.left_out:
                keys.setdefault(row.why, []).append(row.key)
        return [f"ignored: {', '.join(names)} ({why})" for why, names in keys.items()]

    def config(self) -> TrainConfig:
        """Return the configuration of a run with these settings; raises UserError if values contradict each other."""
        return validate(TrainConfig, self.values)

    def text(self) -> str:
        """Return the table, in comments, and the settings as TOML."""
        lines = [f"# From {self.source}, by `zeroshard import-config`.", "#"]
        cells = [("", "theirs", "value", "ours", "")]
        cells += [(row.fate, row.key, _short(row.value), row.ours, row.why) for row in self.rows]
        lines += [f"# {line}".rstrip() for line in columns(cells)]
        return "\n".join(lines) + "\n\n" + tomli_w.dumps(self.values)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
