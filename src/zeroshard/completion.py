"""Scripts that let a shell complete `zeroshard`: written from the same classes as ``--help``, so that they agree.

A script holds all words itself. Asking Python at every press of the key would take a tenth of a second; so after an
upgrade the script is to be written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, get_origin

from pydantic import BaseModel

from zeroshard.errors import UserError
from zeroshard.flags import flags_of
from zeroshard.train.config.validate import fields_by_name, nearest

# fields whose values are places on the disk
_PATHS = frozenset({"config", "data.dir", "data.path", "out", "resume", "run", "source"})


class Verb(Protocol):
    """A word after `zeroshard`, as far as a shell needs to know it."""

    @property
    def summary(self) -> str:
        """What it does."""
        ...

    @property
    def config(self) -> type[BaseModel] | None:
        """The class of its settings."""
        ...

    @property
    def positionals(self) -> tuple[str, ...]:
        """Fields of it that are given without a flag."""
        ...

    @property
    def reads_file(self) -> bool:
        """Whether it takes ``--config``."""
        ...

    @property
    def words(self) -> tuple[str, ...]:
        """What may follow it where it has no settings."""
        ...


@dataclass(frozen=True, slots=True)
class _Flag:
    """``values``: what may follow it; "files": any path; None: a value that nobody can list, or none at all."""

    name: str
    help: str
    values: tuple[str, ...] | Literal["files"] | None
    takes_value: bool


def script(shell: str, verbs: Mapping[str, Verb], shorthands: dict[str, str]) -> str:
    """What ``shell`` must read to complete `zeroshard`.

    Args:
        shell: ``bash``, ``zsh`` or ``fish``.
        verbs: by their names.
        shorthands: table -> the key in it that the bare table name stands for.

    Raises:
        UserError: another shell.
    """
    if shell not in SHELLS:
        raise UserError("shell", f"there is no completion for {shell!r}", nearest(shell, SHELLS, "choose one of these"))
    return SHELLS[shell]([(name, verb, _flags(verb, shorthands)) for name, verb in verbs.items()])


def _flags(verb: Verb, shorthands: dict[str, str]) -> list[_Flag]:
    flags = [_Flag("--help", "Name each setting, its unit and its default.", None, takes_value=False)]
    if verb.reads_file:
        flags.append(_Flag("--config", "TOML file of settings.", "files", takes_value=True))
    if verb.config is None:
        return flags
    fields = fields_by_name(verb.config)
    for name, flag in flags_of(verb.config, shorthands, verb.positionals).items():
        dotted = ".".join(flag.path)
        field = fields[dotted]
        takes_value = flag.kind != "switch"
        values = _values(dotted, field.annotation) if takes_value else None
        flags.append(_Flag(name, field.description or "", values, takes_value))
    return flags


def _values(dotted: str, annotation: Any) -> tuple[str, ...] | Literal["files"] | None:
    if dotted in _PATHS:
        return "files"
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return None


_Table = list[tuple[str, Verb, list[_Flag]]]


def _bash(table: _Table) -> str:
    cases = []
    for name, verb, flags in table:
        after = []
        for flag in flags:
            if flag.values == "files":
                after.append(f"            {flag.name}) compopt -o default; return ;;")
            elif flag.values:
                values = _quoted(" ".join(flag.values))
                after.append(f'            {flag.name}) COMPREPLY=($(compgen -W {values} -- "$word")); return ;;')
            elif flag.takes_value:
                after.append(f"            {flag.name}) return ;;")
        after_flags = ['        case "$previous" in', *after, "        esac"] if after else []
        names = _quoted(" ".join(flag.name for flag in flags))
        words = _quoted(" ".join(verb.words))
        cases += [
            f"    {name})",
            *after_flags,
            '        if [[ "$word" == -* ]]; then',
            f'            COMPREPLY=($(compgen -W {names} -- "$word"))',
            "        else",
            f'            COMPREPLY=($(compgen -W {words} -- "$word"))',
            "            compopt -o default",
            "        fi ;;",
        ]
    verbs = _quoted(" ".join(name for name, _, _ in table))
    lines = [
        "# source this, or write it to ~/.local/share/bash-completion/completions/zeroshard",
        "_zeroshard() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        "    COMPREPLY=()",
        "    if ((COMP_CWORD == 1)); then",
        f'        COMPREPLY=($(compgen -W {verbs} -- "$word"))',
        "        return",
        "    fi",
        '    case "${COMP_WORDS[1]}" in',
        *cases,
        "    esac",
        "}",
        "complete -F _zeroshard zeroshard",
    ]
    return "\n".join(lines)


def _zsh(table: _Table) -> str:
    cases = []
    for name, verb, flags in table:
        specs = []
        for flag in flags:
            spec = f"{flag.name}[{_bracketed(flag.help)}]"
            if flag.values == "files":
                spec += ":path:_files"
            elif flag.values:
                spec += f":value:({' '.join(flag.values)})"
            elif flag.takes_value:
                spec += ":value: "
            specs.append(_quoted(spec))
        rest = f"*:word:_alternative 'words:word:({' '.join(verb.words)})' 'files:path:_files'"
        cases.append(f"    {name}) _arguments " + " \\\n        ".join([*specs, _quoted(rest)]) + " ;;")
    verbs = " ".join(_quoted(f"{name}:{verb.summary}") for name, verb, _ in table)
    lines = [
        "#compdef zeroshard",
        "# write this to a file _zeroshard in a folder of $fpath",
        "_zeroshard() {",
        "    local -a verbs",
        f"    verbs=({verbs})",
        "    if ((CURRENT == 2)); then",
        "        _describe command verbs",
        "        return",
        "    fi",
        "    local verb=$words[2]",
        "    shift words",
        "    ((CURRENT--))",
        "    case $verb in",
        *cases,
        "    esac",
        "}",
        'if [[ "$funcstack[1]" == _zeroshard ]]; then _zeroshard "$@"; else compdef _zeroshard zeroshard; fi',
    ]
    return "\n".join(lines)


def _fish(table: _Table) -> str:
    lines = [
        "# write this to ~/.config/fish/completions/zeroshard.fish",
        "complete -c zeroshard -n __fish_use_subcommand -f",
    ]
    for name, verb, flags in table:
        summary = _quoted(verb.summary, "\\'")
        lines.append(f"complete -c zeroshard -n __fish_use_subcommand -f -a {name} -d {summary}")
        here = f"complete -c zeroshard -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{here} -a {word}" for word in verb.words]
        for flag in flags:
            line = f"{here} -l {flag.name[2:]} -d {_quoted(flag.help, chr(92) + chr(39))}"
            if flag.values == "files":
                line += " -r -F"
            elif flag.values:
                line += f" -x -a {_quoted(' '.join(flag.values))}"
            elif flag.takes_value:
                line += " -x"
            lines.append(line)
    return "\n".join(lines)


SHELLS: dict[str, Callable[[_Table], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def _quoted(text: str, quote: str = "'\\''") -> str:
    """In single quotes; ``quote`` is how the shell writes one inside them."""
    return "'" + text.replace("'", quote) + "'"


def _bracketed(text: str) -> str:
    """What zsh takes inside the brackets of a flag's specification."""
    for special in "\\[]:":
        text = text.replace(special, f"\\{special}")
    return text
