"""Completion scripts for shells: shtab makes them from the same classes of settings as ``--help``.

A script contains all words. Asking Python at each key press would take a tenth of a second; the price is that users
must write the script again after an upgrade.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from zeroshard.cli.flags import flags_of
from zeroshard.host.errors import UserError
from zeroshard.settings.validate import fields_by_name, nearest
from zeroshard.train.config.registered import names_among

if TYPE_CHECKING:
    from zeroshard.cli.verbs.base import Verb

SHELLS = ("bash", "zsh", "fish")
# lets zsh users source the script: shtab's own check only covers `eval`
_ZSH_SOURCED = "[[ $zsh_eval_context[-1] == file ]] && { compdef _shtab_zeroshard zeroshard; return }"
# settings whose values are paths
_PATHS = frozenset({"config", "data.dir", "data.path", "out", "resume", "run", "source"})


def script(shell: str, verbs: Mapping[str, Verb]) -> str:
    """The script that ``shell`` must read to complete `zeroshard`.

    Args:
        shell: ``bash``, ``zsh`` or ``fish``.

    Raises:
        UserError: ``shell`` is none of these.
    """
    if shell not in SHELLS:
        todo = nearest(shell, SHELLS, f"choose one of {', '.join(SHELLS)}")
        raise UserError("shell", f"there is no completion for {shell!r}", todo)
    import shtab

    parser = ArgumentParser("zeroshard", add_help=False)
    parser.add_argument("--help", action="store_true", help="Name the commands.")
    parser.add_argument("--version", action="store_true", help="Print the version.")
    _add_verbs(parser, verbs)
    return shtab.complete(parser, shell, preamble=_ZSH_SOURCED if shell == "zsh" else "")


def _add_verbs(parser: ArgumentParser, verbs: Mapping[str, Verb]) -> None:
    """Add verbs to an argparse parser. It never parses anything: shtab takes its input in this form."""
    subparsers = parser.add_subparsers()
    for name, verb in verbs.items():
        summary = _plain(verb.summary)
        below = subparsers.add_parser(name, add_help=False, help=summary, description=summary)
        _add_flags(below, verb)
        if verb.before:
            _add_verbs(below, {verb.before: verbs[verb.before]})


def _add_flags(parser: ArgumentParser, verb: Verb) -> None:
    import shtab

    if verb.common:
        parser.add_argument("--help", nargs="?", choices=["all"], help="Name the common settings; all: each of them.")
    else:
        parser.add_argument("--help", action="store_true", help="Name each setting, its unit and its default.")
    paths = [parser.add_argument("--config", help="TOML file of settings.")] if verb.reads_file else []
    choices = [word for word in verb.words if not word.startswith("--")]
    for switch in sorted(set(verb.words) - set(choices)):
        parser.add_argument(switch, action="store_true")
    if choices:
        parser.add_argument("word", choices=choices)
    if not verb.before:
        paths.append(parser.add_argument("path", nargs="*"))
    fields = fields_by_name(verb.config) if verb.config else {}
    for name, flag in flags_of(verb.config, verb.positionals).items() if verb.config else ():
        dotted = ".".join(flag.path)
        about = _plain(fields[dotted].description or "")
        if flag.kind == "switch":
            parser.add_argument(name, action="store_true", help=about)
            continue
        values = _values(fields[dotted])
        action = parser.add_argument(name, choices=values, nargs="*" if flag.kind == "many" else None, help=about)
        if dotted in _PATHS:
            paths.append(action)
    for action in paths:
        vars(action)["complete"] = shtab.FILE  # the attribute that shtab reads


def _plain(text: str) -> str:
    """Escape ``%``, with which argparse formats its help."""
    return text.replace("%", "%%")


def _values(field: FieldInfo) -> tuple[str, ...] | None:
    """The values that a field may have, if that is a list of words; else None."""
    if get_origin(field.annotation) is Literal:
        return get_args(field.annotation)
    return names_among(field.metadata)
