"""What a verb is, and how it speaks: its help, and the one line on stderr that an error gets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from zeroshard.errors import UserError, shortened
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.sections import SHORTHANDS
from zeroshard.train.config.toml import read_toml
from zeroshard.train.config.validate import validate

LONGEST_LINE = 1500  # letters of an error's line; a word of it may have 200


@dataclass(frozen=True, slots=True)
class Verb:
    """A word after `zeroshard`, the class of its settings, and what it does with them."""

    summary: str
    run: Callable[[Any, Sequence[str]], int]
    config: type[BaseModel] | None = None
    positionals: tuple[str, ...] = ()
    reads_file: bool = False  # takes --config
    usage: str = ""  # of the words that a verb without settings takes
    words: tuple[str, ...] = ()  # those of them that a shell may complete
    common: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what the short help names, in groups
    before: str = ""  # another verb, with its words, follows after this one's own


def show_help(name: str, verb: Verb, raw: dict[str, Any]) -> None:
    """Print each setting of ``zeroshard NAME``, its unit and its default, which ``raw`` may replace."""
    import tyro

    assert verb.config is not None
    text = verb.summary
    if verb.reads_file:
        text += " Settings: defaults < --config FILE.toml < flags."
    for table, key in SHORTHANDS.items():
        if table in verb.config.model_fields:
            text += f" --{table} NAME stands for --{table}.{key} NAME."
    markers = (tyro.conf.PositionalRequiredArgs,)
    # what has no default has no instance to show defaults from
    default = tyro.MISSING_NONPROP if verb.positionals else validate(verb.config, raw)
    prog = f"zeroshard {name}"
    with _returns_from_help():
        tyro.cli(verb.config, prog=prog, description=text, args=["--help"], default=default, config=markers)


@contextmanager
def _returns_from_help() -> Generator[None]:
    """tyro exits after its help; a verb returns."""
    try:
        yield
    except SystemExit as stop:
        if stop.code:
            raise


def say(line: str, *, all_ranks: bool = False) -> None:
    """One line on stderr, from one rank: the launcher prints for its workers, else rank 0 does, if it still can."""
    from zeroshard.launch import environment

    line = shortened(" ".join(map(shortened, line.split())), LONGEST_LINE)
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    if environment.tell_launcher(line):
        return
    try:
        world = environment.world_from_env()
    except UserError:
        world = None
    if world is None or world.rank == 0 or all_ranks:
        print(f"error: {line}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # a launcher ends the others when one exits: let rank 0 speak first


def read_file(path: str, kind: type[BaseModel]) -> dict[str, Any]:
    """Raw values for `kind`; a training run's file serves other commands too, which take their part."""
    raw = read_toml(path)
    if kind is not TrainConfig:
        validate(TrainConfig, raw)
        raw = {key: value for key, value in raw.items() if key in kind.model_fields}
    return raw
