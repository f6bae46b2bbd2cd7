"""Write docs/reference/: every command, flag and key of `zeroshard`, from the classes that check them.

    python docs/reference.py            # writes the pages; tests/docs/test_reference.py compares them

A flag and the key of a TOML file are one field of a pydantic class, so name, kind, limits, default and meaning all come
from there. Of a command without such a class the usage line is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from zeroshard.cli.flags import flags_of
from zeroshard.cli.verbs import VERBS, Verb
from zeroshard.lab.bench.settings import BENCHES
from zeroshard.lab.sweep.cases import SweepConfig
from zeroshard.settings.base import SHORTHANDS, Config
from zeroshard.settings.validate import fields_by_name

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- Made by `python docs/reference.py` from the settings' classes: do not edit. -->\n\n"
KINDS = MappingProxyType({int: "whole number", float: "number", str: "text", bool: "switch"})
LIMITS = MappingProxyType({"ge": "at least", "gt": "above", "le": "at most", "lt": "below"})
BENCH_FLAGS = (("--json FILE", "Write all that was measured, with the environment."),)
SWEEP_FLAGS = (
    ("--config FILE.toml", "Settings of the sweep, with the tables `[base]` and `[axes]`; flags win over it."),
    ("--base.SETTING VALUE", "Of every run: any flag of [`zeroshard train`](train.md), as `--base.max-steps 30`."),
    ("--axes.SETTING VALUE ...", "Tried one after another: `--axes.strategy zero0 zero3`."),
)


def pages() -> dict[str, str]:
    """Text of each page by its file's name."""
    return {"train.md": MADE + _train_page(), "commands.md": MADE + _commands_page()}


def write(folder: Path = FOLDER) -> list[Path]:
    """Write the pages into ``folder`` and return their paths."""
    folder.mkdir(exist_ok=True)
    paths = [folder / name for name in pages()]
    for path, text in zip(paths, pages().values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def _train_page() -> str:
    verb = VERBS["train"]
    assert verb.config is not None
    tables = [name for name, field in verb.config.model_fields.items() if _is_table(field)]
    parts = [
        "# Settings of a training run\n",
        f"`zeroshard train [--config FILE.toml] [FLAGS]`: {verb.summary}\n",
        "Each setting is a flag and a key of a TOML file; flags win over the file, and the file over the defaults. "
        "A switch such as `--fused` is turned off by `--no-fused`, and is `true` or `false` in a file. "
        "A list takes several words after its flag, and is a list in a file. "
        "An underscore may stand for a hyphen in a flag. "
        + " ".join(f"`--{table} NAME` stands for `--{table}.{key} NAME`." for table, key in SHORTHANDS.items())
        + " `config.toml` in a run's folder holds every setting of that run, secrets of addresses apart: "
        "first those that were given, then in a table `[resolved]` what all others were, by default or derived. "
        "A run that is started from that file takes the given ones.\n",
        "## Keys outside of tables\n",
        _settings(verb.config, in_file=True, skip=tables),
    ]
    for table in tables:
        kind = verb.config.model_fields[table].annotation
        assert isinstance(kind, type)
        about = (kind.__doc__ or "").splitlines()[0]
        parts += [f"## `[{table}]`\n", f"{about}\n", _settings(kind, prefix=f"{table}.", in_file=True)]
    return "\n".join(parts)


def _commands_page() -> str:
    parts = [
        "# Commands\n",
        "What each command of `zeroshard` takes. `--help` after a command prints the same. "
        "[The trainer](../trainer.md#when-something-goes-wrong) lists the exit statuses.\n",
        "`zeroshard --help` names the commands, `zeroshard --version` prints the version.\n",
    ]
    for name, verb in VERBS.items():
        parts += [f"## zeroshard {name}\n", f"`{_usage(name, verb)}`\n", f"{_plain(verb.summary)}\n"]
        if name == "train":
            parts.append("Its settings have [a page of their own](train.md).\n")
        elif name == "prepare":
            parts.append("Its settings are those of [`[data]`](train.md#data) of a training run, and\n")
            parts.append(_settings(verb.config, skip=("data",)))
        elif name == "sweep":
            parts += [_table(("flag", "meaning"), ((f"`{flag}`", text) for flag, text in SWEEP_FLAGS))]
            parts += [_settings(SweepConfig, in_file=True, skip=("base", "axes"))]
        elif name == "bench":
            parts += [_table(("flag of each bench", "meaning"), ((f"`{flag}`", text) for flag, text in BENCH_FLAGS))]
            for bench, kind in BENCHES.items():
                parts += [
                    f"### zeroshard bench {bench}\n",
                    f"{(kind.__doc__ or '').splitlines()[0]}\n",
                    _settings(kind),
                ]
        elif verb.config is not None:
            parts.append(_settings(verb.config, positionals=verb.positionals))
    return "\n".join(parts)


def _usage(name: str, verb: Verb) -> str:
    words = " ".join(word.upper() for word in verb.positionals)
    if name == "sweep" or verb.reads_file:
        words = "[--config FILE.toml]"
    tail = f"{verb.before} [FLAGS]" if verb.before else ""
    flags = "[FLAGS]" if verb.config or name == "sweep" else ""
    return " ".join(filter(None, ("zeroshard", name, verb.usage, words, flags, tail)))


def _settings(
    kind: type[BaseModel],
    *,
    prefix: str = "",
    in_file: bool = False,
    skip: Iterable[str] = (),
    positionals: tuple[str, ...] = (),
) -> str:
    """A table of the fields of ``kind``; ``prefix``: the table of the file in which they stand, with its dot."""
    heads = ("flag", "key", "takes", "default", "meaning") if in_file else ("flag", "takes", "default", "meaning")
    rows = []
    flags = flags_of(kind)
    for dotted, field in fields_by_name(kind).items():
        if dotted.partition(".")[0] in skip:
            continue
        named = [name for name, flag in flags.items() if flag.path == tuple(dotted.split("."))]
        shown = " ".join(f"`--{prefix.replace('_', '-')}{name[2:]}`" for name in named)
        if dotted in positionals:
            shown = f"`{dotted.upper()}` (no flag)"
        row = [shown, f"`{dotted}`", _takes(field), _default(field), _plain(field.description or "")]
        rows.append(row if in_file else [row[0], *row[2:]])
    return _table(heads, rows)


def _takes(field: FieldInfo) -> str:
    """The kind of its values, and their limits."""
    kind: Any = field.annotation
    many = get_origin(kind) is tuple
    if many:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        words = "one of " + ", ".join(f"`{value}`" for value in get_args(kind))
    else:
        words = KINDS.get(kind, "a name")
    limits = [
        f"{word} {getattr(each, short):g}"
        for each in field.metadata
        for short, word in LIMITS.items()
        if isinstance(getattr(each, short, None), int | float)
    ]
    return ("list, each " if many else "") + " ".join((words, " and ".join(limits))).strip()


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "must be given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(f"`{each}`" for each in value) or "none"
    return "empty" if value == "" else f"`{value}`"


def _is_table(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Config)


def _plain(text: str) -> str:
    """``text`` with its flags and placeholders as code, so that a page shows them as they are."""
    text = re.sub(r"(?<![\w`])(--[a-z][\w.-]*[\w])", r"`\1`", text)
    return text.replace("[.gz|.zst]", "(also .gz and .zst)").replace(
        "[:CONFIGURATION][@SPLIT]", "(:CONFIGURATION, @SPLIT)"
    )


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for written in write():
        print(written)
