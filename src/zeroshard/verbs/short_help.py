"""The first level of ``--help``: the settings that most people use, in groups; ``--help all`` names every one.

Where its output goes to a file or another program, which looks for a name in it, all others follow.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from zeroshard.train.config.sections import SHORTHANDS
from zeroshard.train.config.validate import fields_by_name, validate
from zeroshard.verbs.base import Verb

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
    "the answer": ("stage", "ask", "explain", "dry_run", "json"),
}
_WIDEST = 100  # columns; longer lines are hard to read
_INDENT = 4


def short_help(name: str, verb: Verb, raw: dict[str, Any], *, every: bool = False) -> str:
    """The settings of ``verb.common``: their values, what they do, and their defaults, which ``raw`` may replace.

    ``every``: all other settings follow, by their tables.
    """
    assert verb.config is not None
    fields, defaults = fields_by_name(verb.config), validate(verb.config, raw)
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    file = "[--config FILE.toml] " if verb.reads_file else ""
    lines = [f"usage: zeroshard {name} {file}[FLAGS]", "", *textwrap.wrap(verb.summary, width)]
    groups = {**verb.common, **(_others(fields, verb) if every else {})}
    for heading, settings in groups.items():
        lines += ["", f"{heading}:"]
        for dotted in settings:
            flag, values, indent = f"  {_flag(dotted)}", _values(fields[dotted].annotation), " " * _INDENT
            text = f"{fields[dotted].description} (default: {_default(defaults, dotted)})"
            if len(f"{flag} {values}") > width:
                text, values = f"{values.replace('|', ', ')}. {text}", "VALUE"
            lines.append(f"{flag} {values}".rstrip())
            lines += textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    more = f"`zeroshard {name} --help all` names all {len(fields)} settings."
    if verb.reads_file:
        more += " Settings: defaults < --config FILE.toml < flags."
    return "\n".join([*lines, "", *textwrap.wrap(more, width)])


def _others(fields: Iterable[str], verb: Verb) -> dict[str, list[str]]:
    """The settings that ``verb.common`` has not, by a heading for each table."""
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


def _values(annotation: Any) -> str:
    """What may stand after a flag: one of a few words, or the kind of value; nothing after a switch."""
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
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value) or "empty"
