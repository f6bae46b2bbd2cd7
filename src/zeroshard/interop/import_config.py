"""``zeroshard import-config``: somebody else's settings as ours, and what became of each of them.

    zeroshard import-config nanogpt config/train_gpt2.py --batch_size=8 > run.toml
    zeroshard import-config deepspeed ds_config.json > run.toml

What is printed is TOML that `zeroshard train --config` takes, under a table of comments: each of their keys with what
it became, and why where that is not the same. Files are read and never executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeroshard.errors import ExitStatus, UserError
from zeroshard.interop.deepspeed import read_deepspeed
from zeroshard.interop.migration import Migration
from zeroshard.interop.nanogpt import read_nanogpt
from zeroshard.train.config.validate import nearest

KINDS: dict[str, Callable[[Sequence[str]], Migration]] = {"nanogpt": read_nanogpt, "deepspeed": read_deepspeed}


def run_import_config(words: Sequence[str]) -> int:
    """``KIND FILE [--key=value ...]``: print what it becomes; returns the exit status.

    Raises:
        UserError: no such kind, no such file, or one that cannot be read; values that do not go together.
    """
    if not words or words[0] not in KINDS:
        what = f"{words[0]!r} is none of what is read" if words else "whose settings to read is missing"
        todo = nearest(words[0] if words else "", KINDS, f"choose one of {', '.join(KINDS)}")
        raise UserError("import-config", what, todo)
    migration = KINDS[words[0]](words[1:])
    migration.config()
    print(migration.text(), end="")
    return int(ExitStatus.OK)
