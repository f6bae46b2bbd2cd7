"""Data sets of the Hugging Face hub by name: find their files, at a fixed revision.

`datasets` resolves name, configuration and split to files, as it does for its own streaming; `tables` reads them, so
that hub addresses and local files use the same code. The files' addresses name a commit, so a later run reads the same
content.

The hub is asked once, with a short time limit, before `datasets` is, because the loaders in `datasets` retry for half a
minute without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.data.files import ANSWER_S, FileFacts, facts_of, is_io, reason_of, require_package, within
from zeroshard.data.registry import SOURCES, SourceRequest
from zeroshard.data.tables import TABLE_SUFFIXES, Tables, is_table
from zeroshard.host.errors import UserError

_AS_PARQUET = "refs/convert/parquet"  # the hub's own conversion of data sets that are scripts


@dataclass(frozen=True)
class HubName:
    """``OWNER/NAME:CONFIGURATION@SPLIT``; the last two may be left out."""

    repo: str
    configuration: str = ""
    split: str = "train"

    def __str__(self) -> str:
        return self.repo + (f":{self.configuration}" if self.configuration else "")


def parse_hub_name(name: str) -> HubName:
    """Split a name into its parts; raise UserError if it names no data set."""
    rest = (SOURCES[name].hub if name in SOURCES else name).removeprefix("hf:")
    rest, _, split = rest.partition("@")
    repo, _, configuration = rest.partition(":")
    if not repo or repo.count("/") > 1:
        raise UserError("data.source", f"{name!r} names no data set", "write OWNER/NAME[:CONFIGURATION][@SPLIT]")
    return HubName(repo, configuration, split or "train")


def open_hub(asked: SourceRequest) -> Tables:
    """Return the files of a data set on the hub.

    Raises:
        UserError: `datasets` is not installed, the hub cannot be reached, there is no such data set, configuration or
            split, or `tables` cannot read its kind of files; raised within seconds.
    """
    wanted = parse_hub_name(asked.name)
    require_package("datasets", f"{asked.name} on the Hugging Face hub")
    from datasets import config
    from huggingface_hub import HfApi, HfFileSystem, constants
    from huggingface_hub.errors import HfHubHTTPError

    todo = "go online, or give files by --data text --data.path"
    if constants.HF_HUB_OFFLINE or config.HF_DATASETS_OFFLINE:
        raise UserError("data.source", f"{wanted} is on the Hugging Face hub, and HF_HUB_OFFLINE is set", todo)
    hub = HfApi(constants.ENDPOINT)
    try:
        within(ANSWER_S, lambda: hub.dataset_info(wanted.repo))
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            todo = "check its name, or set HF_TOKEN if it is private or gated"  # it hides private and gated data sets
            raise UserError("data.source", f"the hub shows no data set {wanted.repo} ({hub.endpoint})", todo) from None
        if not is_io(error):
            raise
        what = f"{wanted} cannot be had from {hub.endpoint} ({reason_of(error)})"
        raise UserError("data.source", what, todo) from None
    files = _data_files(wanted)
    others = [path for path in files if not is_table(path)]
    if others:
        todo = f"download it and write its text as one of {', '.join(TABLE_SUFFIXES)}"
        raise UserError("data.source", f"{wanted} has files that are no tables of text ({others[0]})", todo)
    # An address that names a commit identifies its content.
    facts = (
        FileFacts(path, int(HfFileSystem().info(path)["size"] or 0), path.removeprefix("hf://"))
        if path.startswith("hf://")
        else facts_of(path)
        for path in files
    )
    return Tables(tuple(facts), asked.column)


def _data_files(wanted: HubName) -> Sequence[str]:
    """Return the addresses of the split's files, in order."""
    import datasets

    datasets.disable_progress_bars()
    configuration = wanted.configuration or None
    try:
        try:
            builder = datasets.load_dataset_builder(wanted.repo, configuration)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            builder = datasets.load_dataset_builder(wanted.repo, configuration, revision=_AS_PARQUET)
    except Exception as error:  # noqa: BLE001 -- mostly an unknown configuration; there is no common class
        first_line = next(iter(str(error).splitlines()), "")
        todo = "write OWNER/NAME:CONFIGURATION"
        raise UserError("data.source", f"{wanted} cannot be opened ({first_line or error!r})", todo) from None
    by_split = builder.config.data_files or {}
    if wanted.split not in by_split:
        splits = ", ".join(map(str, by_split)) or "none that are files"
        raise UserError("data.source", f"{wanted} has no split {wanted.split!r}", f"it has {splits}; write ...@SPLIT")
    return [str(path) for path in by_split[wanted.split]]
