"""Help texts, no wider than the terminal: of one command its settings, in groups, with unit and default.

The short ``--help`` names the settings that most people use, and ``--help all`` every one. If the output goes to a file
or another program (which may search it, as grep does), ``--help`` names every one too.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from zeroshard.cli.flags import is_switch
from zeroshard.cli.verbs.base import Verb
from zeroshard.settings.base import SHORTHANDS
from zeroshard.settings.validate import fields_by_name, validate

_WIDEST, _NARROWEST = 100, 40  # columns; longer lines are hard to read, shorter ones have no room beside a flag
# Settings by their names in a file, in groups: those that the README, the tutorial and the how-tos use.
TRAIN = {
    "what is trained": ("model.name", "data.source", "data.path", "data.tokenizer", "seq_len", "max_steps"),
    "how it is sharded": ("nproc", "strategy", "shard_size", "comm"),
    "a step": ("micro_batch_size", "global_batch_size", "lr", "warmup_steps", "dtype", "device", "compile"),
    "what is written": (
        "out", "resume", "checkpoint_interval", "keep_checkpoints", "eval_interval", "log_interval", "track.to",
    ),
}  # fmt: skip
PLAN = {
    "the run": ("model.name", "seq_len", "global_batch", "micro_batch", "dtype", "optimizer"),
    "the machines": ("gpus", "gpu", "gpus_per_node", "network"),
    "the answer": ("stage", "ask", "explain", "json"),
}
_INDENT = 4


def help_of(name: str, verb: Verb, raw: dict[str, Any], *, every: bool = False) -> str:
    """The settings of ``verb.common`` (all settings if that is empty): values, meaning and defaults.

    Values in ``raw`` replace defaults. ``every``: all other settings follow, grouped by table.
    """
    assert verb.config is not None
    fields, width = fields_by_name(verb.config), help_width()
    # a verb with required positionals has no instance to show defaults from, and takes no file
    defaults = None if verb.positionals else validate(verb.config, raw)
    words = [name, *map(str.upper, verb.positionals), *["[--config FILE.toml]"] * verb.reads_file, "[FLAGS]"]
    words += [verb.before, "[FLAGS]"] if verb.before else []
    lines = [usage(" ".join(words)), "", *wrapped(verb.summary)]
    groups = {**verb.common, **(_others(fields, verb) if every else {})} if verb.common else _all(verb, fields)
    for heading, settings in groups.items():
        lines += ["", f"{heading}:"]
        for dotted in settings:
            field, indent = fields[dotted], " " * _INDENT
            flag, values = f"  {_flag(dotted)}", values_in_words(field.annotation)
            default = _default(defaults, dotted) if defaults else default_in_words(field.default)
            text = f"{field.description} (default: {default})"
            if is_switch(field.annotation):
                flag += f", {_off(flag.strip())}"
            if dotted in verb.positionals:
                flag, values, text = f"  {dotted.upper()}", "", field.description or ""
            if len(f"{flag} {values}") > width:
                text, values = f"{values.replace('|', ', ')}. {text}", "VALUE"
            lines.append(f"{flag} {values}".rstrip())
            lines += textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    more = [f"`zeroshard {name} --help all` names all {len(fields)} settings."] if verb.common else []
    more += ["Settings: defaults < --config FILE.toml < flags."] if verb.reads_file else []
    return "\n".join([*lines, "", *wrapped(" ".join(more))]).rstrip()


def _all(verb: Verb, fields: Iterable[str]) -> dict[str, Sequence[str]]:
    """Groups of a verb that has few settings: its positional arguments, and its flags."""
    settings = [name for name in fields if name not in verb.positionals]
    groups: dict[str, Sequence[str]] = {"what to give": verb.positionals, "settings": settings}
    return {heading: group for heading, group in groups.items() if group}


def _others(fields: Iterable[str], verb: Verb) -> dict[str, list[str]]:
    """The settings that are not in ``verb.common``, with a heading for each table."""
    common = {*chain(*verb.common.values())}
    found: dict[str, list[str]] = {"all other settings": []}
    for dotted in fields:
        table = dotted.rpartition(".")[0]
        if dotted not in common:
            found.setdefault(f"all other settings of [{table}]" if table else "all other settings", []).append(dotted)
    return {heading: settings for heading, settings in found.items() if settings}


def _flag(dotted: str) -> str:
    table, _, key = dotted.rpartition(".")
    return f"--{table if table and SHORTHANDS.get(table) == key else dotted}".replace("_", "-")


def _off(flag: str) -> str:
    """The flag that turns a switch off: ``--no-fused``, ``--data.no-packing``."""
    table, dot, key = flag.removeprefix("--").rpartition(".")
    return f"--{table}{dot}no-{key}"


def values_in_words(annotation: Any) -> str:
    """The value that follows a flag, for its help: the choices, or the kind of value; empty for a switch."""
    if annotation is bool:
        return ""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) is tuple:
        return "VALUE ..."
    return {int: "N", float: "X"}.get(annotation, "VALUE")


def _default(defaults: BaseModel, dotted: str) -> str:
    value: Any = defaults
    for part in dotted.split("."):
        value = getattr(value, part)
    return default_in_words(value)


def default_in_words(value: Any) -> str:
    """Format a default for help: a switch is ``yes`` or ``no``, an empty list ``none``, an empty string ``empty``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value) or "empty"


def help_width() -> int:
    """Width of a help text in columns: the terminal's, or 80 in a pipe; from `_NARROWEST` to `_WIDEST`."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Wrap ``text`` into lines of `help_width`; all but the first are indented by ``indent`` spaces."""
    return textwrap.wrap(text, help_width(), subsequent_indent=" " * indent, break_on_hyphens=False)


def named(items: Iterable[tuple[str, str]], name_width: int) -> list[str]:
    """Lines of names, ``name_width`` columns wide, with their descriptions wrapped beside them; indented by two."""
    lines: list[str] = []
    for name, text in items:
        start, rest = f"  {name:<{name_width}}", " " * (name_width + 2)
        lines += textwrap.wrap(text, help_width(), initial_indent=start, subsequent_indent=rest, break_on_hyphens=False)
    return lines


def usage(words: str) -> str:
    """``usage: zeroshard WORDS``, wrapped, with further lines indented below ``zeroshard``."""
    return "\n".join(wrapped(f"usage: zeroshard {words}", indent=len("usage: ")))
