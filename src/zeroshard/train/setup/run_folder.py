"""The folder of a run: creates or reopens it, locks it against other runs, and writes its configuration into it."""

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

# Errors after which another --out helps, so they are a UserError; any other error is a failure of the disk.
ANOTHER_FOLDER_HELPS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
}


def tokenizer_folder(run_folder: Path) -> Path:
    """The folder inside a run folder for its tokenizer, so that the run can generate text without its training data."""
    return run_folder / "tokenizer"


def claim_folder(folder: Path, *, resuming: bool) -> RunLock:
    """Create the run folder, or check that the existing one may be used, and lock it.

    Raises:
        UserError: another run is writing there; the folder has a run and this one does not resume; or the folder or a
            file in it cannot be used.
        OSError: the disk is full or fails.
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
    """Write the configuration and tokenizer into the folder; `claim_folder` then treats it as that of a run."""
    (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    corpus.keep_tokenizer(tokenizer_folder(folder))
    keep_text_files(config, folder)
