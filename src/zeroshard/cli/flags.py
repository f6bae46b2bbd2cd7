"""Parses flags into a nested dict of raw values, with the same structure as a TOML file.

Values of flags stay text here; `zeroshard.settings.validate` parses and checks them, like the same key in a file.
`zeroshard.cli.verbs.help` prints ``--help`` from the same classes. No parser of others is used, because flags are
merged over a file before everything is checked, and an error is one line.

Grammar: ``--seq-len 256``, ``--seq-len=256``, ``--data.max-tokens 9``, ``--fused`` and ``--no-fused``,
``--compile``, ``--compile auto`` and ``--no-compile``, ``--data.path a.txt b.txt``; an underscore may stand for a
hyphen, ``--model NAME`` for ``--model.name NAME``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from zeroshard.host.errors import UserError
from zeroshard.settings.base import SHORTHANDS
from zeroshard.settings.validate import NAMES_OF_OTHERS, fields_by_name, nearest, no_text


@dataclass(frozen=True, slots=True)
class Flag:
    """The path of the setting that a flag sets, and how many arguments the flag takes."""

    path: tuple[str, ...]
    kind: Literal["one", "many", "switch"]
    switch_value: bool = True  # the value that a switch sets
    words: tuple[str, ...] = ()  # what may follow a switch, as its value


def flags_of(config: type[BaseModel], positionals: Sequence[str] = ()) -> dict[str, Flag]:
    """All flags that `read_flags` accepts, by name with hyphens.

    Args:
        config: the class whose fields become flags.
        positionals: fields that are given as positional arguments, and have no flag.
    """
    flags: dict[str, Flag] = {}
    for dotted, field in fields_by_name(config).items():
        if dotted in positionals:
            continue
        path = tuple(dotted.split("."))
        name = dotted.replace("_", "-")
        if is_switch(field.annotation):
            table, dot, leaf = name.rpartition(".")
            flags[f"--{name}"] = Flag(path, "switch", words=get_args(field.annotation))
            flags[f"--{table}{dot}no-{leaf}"] = Flag(path, "switch", switch_value=False)
        else:
            flags[f"--{name}"] = Flag(path, "many" if get_origin(field.annotation) is tuple else "one")
    for table, key in SHORTHANDS.items():
        if (named := f"--{table}.{key.replace('_', '-')}") in flags:
            flags[f"--{table}"] = flags[named]
    return flags


def is_switch(annotation: Any) -> bool:
    """Whether the setting is turned on by its flag alone, and off by ``--no-``: a bool, or a choice with on and off."""
    return annotation is bool or {"on", "off"} <= {*get_args(annotation)}


def read_flags(argv: Sequence[str], flags: dict[str, Flag], positionals: Sequence[str] = ()) -> dict[str, Any]:
    """Raw values by key, nested like the configuration; settings that were not given are absent.

    Raises:
        UserError: an unknown flag (the nearest one is named), a flag without its value, or an argument that belongs to
            no flag.
    """
    values: dict[str, Any] = {}
    unnamed = list(positionals)
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if not unnamed:
                raise UserError(word, "belongs to no flag", "write --FLAG VALUE, see --help")
            values[unnamed.pop(0)] = word
            continue
        name, equals, joined = word.partition("=")
        name = name.replace("_", "-")
        flag = flags.get(name)
        if flag is None:
            known = f"--{NAMES_OF_OTHERS.get(name[2:].replace('-', '_'), '')}".replace("_", "-")
            todo = f"here it is {known}" if known in flags else nearest(name, flags, "see --help")
            raise UserError(name, "there is no such flag", todo)
        if flag.kind == "switch":
            next_word = words[0] if words and flag.words and not equals else "--"
            follows = next_word in flag.words or not (unnamed or next_word.startswith("--"))
            value: Any = joined if equals else words.pop(0) if follows else flag.switch_value
            if equals and not flag.switch_value:
                raise UserError(name, "takes no value", f"write {name} alone")
        elif equals:
            value = [joined] if flag.kind == "many" else joined
        else:
            value = _take(name, flag, words)
        _put(values, flag.path, value)
    return values


def refuse_no_text(argv: Sequence[str]) -> None:
    """Raise UserError for an argument that is not valid text: it could not be printed or written into a TOML file."""
    for word in argv:
        what = no_text(word)
        if what:
            raise UserError(ascii(word)[1:-1], what, "write it in UTF-8, without control characters of that kind")


def take_option(argv: Sequence[str], name: str) -> tuple[str, list[str]]:
    """The last value of the option ``name`` ("" if it is not given), and the other arguments."""
    value, rest, words = "", [], list(argv)
    while words:
        word = words.pop(0)
        if word == name:
            value = _take(name, Flag((), "one"), words)
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest


def _take(name: str, flag: Flag, words: list[str]) -> Any:
    """Take the value of a flag from the arguments ``words`` after it, and remove it from them."""
    if not words or words[0].startswith("--"):
        raise UserError(name, "has no value", f"write {name} VALUE")
    if flag.kind == "one":
        return words.pop(0)
    taken = []
    while words and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for table in path[:-1]:
        values = values.setdefault(table, {})
    values[path[-1]] = value
