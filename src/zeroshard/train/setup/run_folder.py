"""The folder of a run: made or found, held against other runs, and described."""

from __future__ import annotations

import errno
from pathlib import Path

from zeroshard.errors import UserError
from zeroshard.regular_files import require_regular
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import dump_toml
from zeroshard.train.setup.corpus import Corpus
from zeroshard.train.setup.hugging_face import keep_text_files
from zeroshard.train.state.lock import RunLock

# Why a folder cannot be written that was asked for; anything else is the disk's.
ANOTHER_FOLDER_HELPS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
}


def tokenizer_folder(run_folder: Path) -> Path:
    """Where a run keeps what its tokenizer needs, so that it can write text without its training data."""
    return run_folder / "tokenizer"


def claim_folder(folder: Path, *, resuming: bool) -> RunLock:
    """Make the run folder, or see that the one that is there may be used, and hold it.

    Raises:
        UserError: another run is writing there; it holds a run and this one does not resume; it may not be written.
        OSError: the disk is full, or fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder)
    except OSError as error:
        if error.errno not in ANOTHER_FOLDER_HELPS:
            raise
        raise UserError(
            "out", f"{folder} cannot be written ({error.strerror})", "choose a folder that you may write"
        ) from None
    if not resuming and any((folder / name).exists() for name in ("config.toml", "metrics.jsonl")):
        lock.close()
        raise UserError("out", f"{folder} already holds a run", "choose another --out, or resume it with --resume auto")
    for path in (folder / "config.toml", folder / "metrics.jsonl"):
        try:
            if path.exists():
                require_regular(path)
        except OSError as error:
            lock.close()
            todo = "remove it, or choose another --out"
            raise UserError("out", f"{path} cannot be used ({error.strerror})", todo) from None
    return lock


def describe_run(folder: Path, config: TrainConfig, corpus: Corpus) -> None:
    """Write down what the run is, and keep what its tokenizer needs: from here on the folder holds a run."""
    (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    corpus.keep_tokenizer(tokenizer_folder(folder))
    keep_text_files(config, folder)
