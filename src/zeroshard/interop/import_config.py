"""``zeroshard import-config``: convert another program's settings to ours, and report what each of them became.

    zeroshard import-config nanogpt config/train_gpt2.py --batch_size=8 > run.toml
    zeroshard import-config deepspeed ds_config.json > run.toml

It prints TOML for `zeroshard train --config`, below a table in comments: each key of the other program, what it became,
and why. What is ignored is printed on stderr too. Files are parsed and never executed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from zeroshard.errors import ExitStatus, UserError
from zeroshard.interop.deepspeed import read_deepspeed
from zeroshard.interop.migration import Migration
from zeroshard.interop.nanogpt import read_nanogpt
from zeroshard.train.config.validate import nearest

KINDS: dict[str, Callable[[Sequence[str]], Migration]] = {"nanogpt": read_nanogpt, "deepspeed": read_deepspeed}


def run_import_config(words: Sequence[str]) -> int:
    """Convert the settings in ``KIND FILE [--key=value ...]``, print the result, and return the exit status.

    Raises:
        UserError: there is no such kind or file, the file cannot be read, or values contradict each other.
    """
    if not words or words[0] not in KINDS:
        what = f"{words[0]!r} cannot be imported" if words else "the name of the other program is missing"
        todo = nearest(words[0] if words else "", KINDS, f"choose one of {', '.join(KINDS)}")
        raise UserError("import-config", what, todo)
    migration = KINDS[words[0]](words[1:])
    migration.config()
    print(migration.text(), end="")
    for line in migration.lines():
        print(line, file=sys.stderr)
    return int(ExitStatus.OK)
