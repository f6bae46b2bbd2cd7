"""``zeroshard prepare``: writes the tokens of a data source into a folder, and shows progress and remaining time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from zeroshard.data.meta import META_NAME, read_meta
from zeroshard.data.prepare import Progress, prepare
from zeroshard.data.sources import has_columns
from zeroshard.data.spec import DataSpec, data_dir
from zeroshard.data.tokens import verify
from zeroshard.host.columns import printable
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.train.config.data_section import DataConfig, require_data

LINE_S = 10.0  # seconds between progress lines


def data_spec(data: DataConfig) -> DataSpec:
    """Return the specification of the data to prepare; a UserError if the user has not named any data."""
    require_data(data)
    same = ("max_tokens", "column", "format", "template", "messages", "prompt", "completion")
    named = {name: getattr(data, name) for name in same}
    if data.column != "text" and data.val_path and not _has_columns(data):
        sets = (data.model_copy(update={"source": "text", "path": (path,)}) for path in data.val_paths.values())
        named["column"] = "text" if any(map(_has_columns, sets)) else data.column  # it is a validation set's column
    return DataSpec(data.source, data.path, data.tokenizer, data.val_fraction, **named)


def _has_columns(data: DataConfig) -> bool:
    return has_columns(data.source, data.path)


def data_folder(data: DataConfig) -> Path:
    """The folder of the prepared tokens."""
    return Path(data.dir) if data.dir else data_dir(data_spec(data))


def run_prepare(data: DataConfig) -> int:
    """Prepare ``data``, and print its folder and numbers of tokens; returns the exit status.

    Raises:
        UserError: as `zeroshard.data.prepare.prepare`.
        OSError: the disk failed or is full.
    """
    folder = prepare_data(data)
    meta = read_meta(folder)
    splits = ", ".join(f"{split.num_tokens:,} {name}" for name, split in meta.splits.items())
    print(f"tokens in {folder}: {splits}")
    if meta.examples:
        of_each = meta.examples.items()
        each = [f"{of.num_examples:,} {name} ({of.num_counted:,} tokens count)" for name, of in of_each]
        print(f"examples: {', '.join(each)}")
    return int(ExitStatus.OK)


def run_verify(data: DataConfig) -> int:
    """Compare every file of the folder of ``data`` with its checksum, print what is damaged; returns the exit status.

    Raises:
        UserError: there is no prepared folder.
    """
    folder = data_folder(data)
    try:
        damages, meta = verify(folder), read_meta(folder)
    except UserError as error:
        if not (folder / META_NAME).is_file():
            raise
        damages, meta = (error.what,), None
    for line in damages:
        print(printable(line))
    if meta is None or damages:
        return int(ExitStatus.CHECK_FAILED)
    num_tokens = sum(split.num_tokens for split in meta.splits.values())
    print(f"{folder}: undamaged, {num_tokens:,} tokens")
    return int(ExitStatus.OK)


def prepare_data(data: DataConfig) -> Path:
    """Prepare ``data``, show progress on stderr, and return the folder; raises what `run_prepare` raises."""
    return prepare(data_spec(data), data_folder(data), num_workers=data.workers, on_progress=ProgressLines())


class ProgressLines:
    """Prints the progress of a preparation on stderr, a line every ``line_s`` seconds."""

    def __init__(self, line_s: float = LINE_S) -> None:
        self._line_s, self._said_at = line_s, time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Print the progress, if ``line_s`` seconds have passed since the last line."""
        if time.monotonic() - self._said_at >= self._line_s:
            self._said_at = time.monotonic()
            print(facts_of(progress), file=sys.stderr, flush=True)


def facts_of(progress: Progress) -> str:
    """Format progress as ``12.3%  123,456,789 tokens  1,234,567 tok/s  left 0:12:34``."""
    left = round(progress.left_s)
    clock = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    return f"{progress.fraction:.1%}  {progress.num_tokens:,} tokens  {progress.tokens_per_s:,.0f} tok/s  left {clock}"
