"""The folder of a run: creates or reopens it, locks it against other runs, and writes its configuration into it."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroshard import checkpoint
from zeroshard.comm import Communicator
from zeroshard.comm.agree import first_rank_does
from zeroshard.data import DataMeta, Tokenizer, load_tokenizer, read_meta
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import link_in, require_regular, write_inside
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.data_section import UNNAMED, DataConfig
from zeroshard.train.config.toml import dump_toml
from zeroshard.train.loop.run import Corpus
from zeroshard.train.setup.hugging_face import keep_text_files, kept_folder
from zeroshard.train.state.folders import checkpoint_folder
from zeroshard.train.state.lock import RunLock, was_locked

# Errors after which another --out helps, so they are a UserError; any other error is a failure of the disk.
ANOTHER_FOLDER_HELPS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
}

_WRITTEN = ("config.toml", "metrics.jsonl", "summary.json")  # files that a run writes over
_AGAIN = "copy the folder from where the run came from, or train it on by --resume auto, which writes it again"
_ALSO_OPENED = ("tracker-id", "fit.json", "stacks", "trace", "tensorboard", "offload")


def tokenizer_folder(run_folder: Path) -> Path:
    """The folder inside a run folder for its tokenizer, so that the run can generate text without its training data."""
    return run_folder / "tokenizer"


def kept_meta(run_folder: Path, data: DataConfig) -> DataMeta | None:
    """What a run keeps of its tokenizer; None if it never had one (some imported models), or is a checkpoint alone.

    Args:
        run_folder: the run.
        data: its settings of data.

    Raises:
        UserError: the folder is missing or damaged.
    """
    folder = tokenizer_folder(run_folder)
    if folder.is_dir():
        with _of_a_run():
            return read_meta(folder)
    if not (run_folder / "config.toml").is_file() or (data.source == UNNAMED and data.tokenizer == "bytes"):
        return None
    raise UserError("run", f"{folder}, in which a run keeps its tokenizer, is missing", _AGAIN)


def kept_tokenizer(run_folder: Path, data: DataConfig) -> Tokenizer | None:
    """The tokenizer that a run keeps; None also if its tokens are synthetic. Arguments and errors as of `kept_meta`."""
    meta = kept_meta(run_folder, data)
    if meta is None or meta.tokenizer == "none":
        return None
    with _of_a_run():
        return load_tokenizer(tokenizer_folder(run_folder))


@contextmanager
def _of_a_run() -> Generator[None]:
    """Advise, for a damaged file that a run keeps, what mends a run."""
    try:
        yield
    except UserError as error:
        raise (UserError("run", error.what, _AGAIN) if error.field == "data.dir" else error) from None


class ClaimedFolder:
    """A run folder that is locked for this run: created, or checked that the existing one may be used.

    Attributes:
        lock: the lock.

    Raises:
        UserError: another run is writing there; the folder has a run and this one does not resume; it has files of
            another program; or the folder or a file in it cannot be used. Nothing is left behind.
        OSError: the disk is full or fails.
    """

    def __init__(self, folder: Path, *, resuming: bool) -> None:
        self._folder, self._there, self._fitted = folder, _written(folder), (folder / "fit.json").exists()
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]  # the innermost first
        is_run = was_locked(folder) or checkpoint.latest(checkpoint_folder(folder)) is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = RunLock(folder)
        except OSError as error:
            self._remove_made()
            if error.errno not in ANOTHER_FOLDER_HELPS:
                raise
            raise UserError(
                "out", f"{folder} cannot be written ({error.strerror})", "choose a folder that you may write"
            ) from None
        try:
            _require_usable(folder, resuming=resuming, is_run=is_run)
        except UserError:
            self.discard()
            raise

    def discard(self) -> None:
        """Release the folder; if the run never began, remove the lock and the empty folders that were made for it."""
        if _written(self._folder) == self._there:
            self.lock.discard()
            if not self._fitted:
                (self._folder / "fit.json").unlink(missing_ok=True)
            self._remove_made()
        else:
            self.lock.close()

    def _remove_made(self) -> None:
        with suppress(OSError):  # one is not empty, or was never made
            for each in self._made:
                each.rmdir()


@contextmanager
def claimed(folder: Path, comm: Communicator, *, resuming: bool) -> Generator[RunLock | None]:
    """Claim a run's folder for the block, and hand it out with its lock on rank 0; if the block raises, release it."""
    found: list[ClaimedFolder] = []  # filled on rank 0 alone
    first_rank_does(comm, lambda: found.append(ClaimedFolder(folder, resuming=resuming)))
    try:
        yield found[0].lock if found else None
    except BaseException:
        for each in found:
            each.discard()
        raise


def _written(folder: Path) -> list[Path]:
    return [folder / name for name in _WRITTEN if (folder / name).exists()]


def _require_no_links(folder: Path) -> None:
    """Raise UserError if what a run opens in its folder is a link: [Note: Inside a folder] in `regular_files`.

    Those who open it would raise too, each when its turn comes.
    """
    opened = [*(folder / name for name in (*_WRITTEN, *_ALSO_OPENED)), tokenizer_folder(folder), kept_folder(folder)]
    links = [link_in(path) for path in opened]
    # in these two are links of our own (`best`), and of W&B's
    links += [link_in(path, deep=False) for path in (checkpoint_folder(folder), folder / "wandb")]
    for link in filter(None, links):
        what = f"{link} is a symbolic link, and a run opens nothing in its folder through one"
        raise UserError("out", what, "remove it, choose another --out, or let the run's folder itself be a link")


def _require_usable(folder: Path, *, resuming: bool, is_run: bool) -> None:
    """Raise UserError if ``folder`` has files that this run may not write over."""
    _require_no_links(folder)
    there = _written(folder)
    if there and not resuming:
        raise UserError("out", f"{folder} already holds a run", "choose another --out, or resume it with --resume auto")
    for path in there:
        try:
            require_regular(path)
        except OSError as error:
            todo = "remove it, or choose another --out"
            raise UserError("out", f"{path} cannot be used ({error.strerror})", todo) from None
    if there and not is_run:
        what = f"{there[0]} is there, and {folder} holds no checkpoint and no lock of a run"
        raise UserError("out", what, "choose another --out: this one is another program's")


def describe_run(folder: Path, config: TrainConfig, corpus: Corpus) -> None:
    """Write the configuration and tokenizer into the folder; `ClaimedFolder` then treats it as that of a run."""
    named = config.model_copy(update={"out": config.out})  # the run's place, even where its name was derived
    write_inside(folder, "config.toml", dump_toml(named))
    corpus.keep_tokenizer(tokenizer_folder(folder))
    keep_text_files(config, folder)
