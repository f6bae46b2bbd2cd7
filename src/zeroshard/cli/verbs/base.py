"""`Verb`, the entry of a command in the table of commands, and one-line errors on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.host.columns import printable
from zeroshard.host.errors import UserError, shortened
from zeroshard.host.masked_addresses import masked
from zeroshard.settings.validate import by_dotted_name, validate
from zeroshard.train.config.config import TrainConfig, merge
from zeroshard.train.config.named_code import require_asked
from zeroshard.train.config.toml import read_given

LONGEST_LINE = 1500  # most characters of an error's line; a single word has at most 200


@dataclass(frozen=True, slots=True)
class Verb:
    """A command after `zeroshard`: its summary, the class of its settings, and the function that runs it."""

    summary: str
    run: Callable[[Any, Sequence[str]], int]
    config: type[BaseModel] | None = None
    positionals: tuple[str, ...] = ()
    reads_file: bool = False  # whether it takes --config
    usage: str = ""  # for a verb without settings: its arguments, as the usage line shows them
    words: tuple[str, ...] = ()  # the fixed words among them
    common: Mapping[str, Sequence[str]] = field(default_factory=dict)  # heading -> settings that the short help shows
    before: str = ""  # another verb that follows this one's own arguments, with arguments of its own


def say(line: str, *, all_ranks: bool = False) -> None:
    """Print one error line on stderr, once for all ranks.

    If our launcher started this rank, the launcher prints the line. Otherwise rank 0 prints it, or every rank if
    ``all_ranks``.
    """
    from zeroshard.host.launch import environment

    line = shortened(" ".join(map(shortened, masked(line).split())), LONGEST_LINE)
    line = printable(line)
    if environment.tell_launcher(line):
        return
    try:
        world = environment.world_from_env()
    except UserError:
        world = None
    if world is None or world.rank == 0 or all_ranks:
        print(f"error: {line}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # a launcher ends all ranks when one exits: give rank 0 time to print


def read_file(path: str, kind: type[BaseModel]) -> dict[str, Any]:
    """Raw settings for ``kind`` from a TOML file; another command than ``train`` takes its part of a run's file."""
    raw = read_given(path)
    if kind is not TrainConfig:
        validate(TrainConfig, raw)
        raw = {key: value for key, value in raw.items() if key in kind.model_fields}
    return raw


def checked_settings(
    kind: type[BaseModel], raw: Mapping[str, Any], words: Sequence[str], path: str, positionals: Sequence[str] = ()
) -> Any:
    """Return the settings of the flags ``words`` over ``raw``, which the file at ``path`` (empty: none) has given.

    Raises:
        UserError: a flag or setting is wrong, or the file names code that no flag asks for.
    """
    given = read_flags(words, flags_of(kind, positionals), positionals)
    config = validate(kind, merge(raw, given))
    if path:
        require_asked(config, by_dotted_name(given), path)
    return config
