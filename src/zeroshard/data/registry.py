"""Data sources by name: the values of ``--data``, apart from data sets of the Hugging Face hub.

A new source is one file in this folder and one row of `SOURCES`. Messages and ``--help`` read the
rows, which needs neither torch nor numpy. ``--data module:name`` is a user's own source: it has no row, and all its
properties have their default values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from zeroshard.host.lazily import made_at


@dataclass(frozen=True)
class SyntheticSize:
    """The settings of the synthetic source."""

    vocab_size: int
    num_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """The arguments from which a source is made."""

    name: str  # the name that the user asked for
    paths: tuple[str, ...]  # the paths of ``--data.path``
    synthetic: SyntheticSize  # the settings of the source ``synthetic``
    column: str = "text"  # the column of tables that contains the text
    vocab_size: int | None = None  # vocabulary size of ids that another program wrote; None if it is unknown


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """A row of `SOURCES`; calling it makes the source.

    Attributes:
        factory: ``module:name`` of a class or function that takes a `SourceRequest` and returns a source (a
            `TextSource`, or `Tables`); or that class or function itself.
        paths: how many ``--data.path`` it takes: none, at least one ("some"), or any number ("any").
        has_text: False if the source has token ids instead of text, so that nothing is encoded.
        hub: the data set of the Hugging Face hub that the name stands for; empty if it is none.
        has_columns: False if there are no columns, so that ``--data.column`` would have no effect.
    """

    factory: str | Callable[[SourceRequest], Any]
    paths: Literal["none", "some", "any"] = "any"
    has_text: bool = True
    hub: str = ""
    has_columns: bool = True

    def __call__(self, asked: SourceRequest) -> Any:
        """Make the source."""
        return made_at(self.factory, "data.source", (), asked)


HUB, BUILT_IN = "zeroshard.data.hub:open_hub", "zeroshard.data.sources:built_in"
SOURCES: dict[str, SourceEntry] = {
    "python-stdlib": SourceEntry(BUILT_IN, "none", has_columns=False),
    "python-docs": SourceEntry(BUILT_IN, "none", has_columns=False),
    "text": SourceEntry("zeroshard.data.sources:text_or_tables", "some"),
    "synthetic": SourceEntry(BUILT_IN, "none", has_text=False, has_columns=False),
    "bin": SourceEntry(BUILT_IN, "some", has_text=False, has_columns=False),
    "fineweb-edu": SourceEntry(HUB, "none", hub="HuggingFaceFW/fineweb-edu:sample-10BT"),
    "openwebtext": SourceEntry(HUB, "none", hub="Skylion007/openwebtext"),
}


def source_entry(name: str) -> SourceEntry:
    """Return the row for ``name``: the hub's for its data sets, one with default properties for ``module:name``."""
    if name in SOURCES:
        return SOURCES[name]
    return SourceEntry(HUB, "none") if is_hub_name(name) else SourceEntry(name)


def is_hub_name(name: str) -> bool:
    """Whether ``name`` is a data set of the hub: a row with ``hub``, ``OWNER/NAME``, or anything after ``hf:``."""
    if name in SOURCES:
        return bool(SOURCES[name].hub)
    return name.startswith("hf:") or name.partition(":")[0].count("/") == 1
