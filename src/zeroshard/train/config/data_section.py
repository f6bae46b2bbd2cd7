"""The table ``[data]`` of a run's settings."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_serializer, model_validator

from zeroshard.data.registry import SOURCES, is_hub_name
from zeroshard.host.errors import UserError
from zeroshard.host.masked_addresses import masked
from zeroshard.settings.base import SHORTHANDS, Config, Count, OnResume

UNNAMED = "unnamed"  # the source of an imported run: the user has to name its data before training


class DataConfig(Config):
    """Settings of the data: which text to train on, how to tokenize it, and where to keep the tokens."""

    source: str = Field(
        "python-stdlib",
        min_length=1,
        description=f"{', '.join(SOURCES)}; OWNER/NAME[:CONFIGURATION][@SPLIT] of the Hugging Face hub; a path, as "
        "--data mine.txt; or module:name of your own. bin: tokens of nanoGPT or llm.c.",
    )
    path: tuple[str, ...] = Field(
        (), description="Files, folders, globs or addresses to read: text, .parquet, .csv, .jsonl[.gz|.zst], .bin."
    )
    column: str = Field("text", min_length=1, description="Column of .parquet or .csv, key of .jsonl, with the text.")
    tokenizer: str = Field(
        "bytes",
        min_length=1,
        description="bytes, gpt2, another of tiktoken's, bpe:N (N trained tokens), json:PATH of a tokenizer.json.",
    )
    val_path: tuple[str, ...] = Field(
        (), description="Further validation sets, each NAME=FILE, whose losses are logged as val_loss/NAME."
    )
    val_fraction: float = Field(0.1, gt=0, lt=1, description="Share of the text kept for validation.")
    max_tokens: Count = Field(0, ge=0, description="Tokens to keep at most, as 500000 or 1B; 0: all.")
    dir: str = Field("", description="Folder of the prepared tokens; empty: named after the rest, in data/.")
    streaming: bool = Field(
        False, description="Train straight from .parquet, .jsonl or the hub, and prepare nothing before."
    )
    document_mask: Annotated[bool, OnResume.SAID] = Field(
        False, description="Attention stays inside a document; the tokenizer must end them."
    )
    packing: bool = Field(
        False, description="chat, prompt: rows of seq_len tokens hold several examples; attention stays inside each."
    )
    format: Literal["text", "chat", "prompt"] = Field(
        "text",
        description="text; chat: conversations; prompt: pairs of prompt and completion. Of these two the loss is that "
        "of what the model answers.",
    )
    template: str = Field(
        "", description="chat: file of a template in Jinja2, or chatml; empty: that beside the tokenizer.json."
    )
    messages: str = Field("messages", min_length=1, description="chat: column of the lists of role and content.")
    prompt: str = Field("prompt", min_length=1, description="prompt: column of what is given.")
    completion: str = Field("completion", min_length=1, description="prompt: column of what is learned.")
    workers: int = Field(0, ge=0, description="Processes that encode text; 0: one per core, as far as there is work.")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, raw: Any) -> Any:
        return _with_path({SHORTHANDS["data"]: raw} if isinstance(raw, str) else raw)

    @field_serializer("path", "val_path")
    def _without_secrets(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        """Whatever is made of these settings (config.toml, manifests, logs, trackers) has addresses without secrets."""
        return tuple(map(masked, paths))

    @property
    def val_paths(self) -> dict[str, str]:
        """The file of each further validation set, by the set's name."""
        return {name: path for name, _, path in (each.partition("=") for each in self.val_path)}

    @model_validator(mode="after")
    def _validation_sets_have_names(self) -> Self:
        names = []
        for each in self.val_path:
            name, _, path = each.partition("=")
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or not path:
                raise UserError("data.val_path", f"{each!r} is no NAME=FILE", "write each as code=code.jsonl")
            if name in names:
                raise UserError("data.val_path", f"two sets have the name {name}", "give each its own")
            names.append(name)
        if names and self.streaming:
            todo = "leave it out, or prepare the data: without data.streaming"
            raise UserError("data.val_path", "is given, and a stream validates on what it holds out alone", todo)
        return self

    @model_validator(mode="after")
    def _fits_its_format(self) -> Self:
        for name in self.changed(*_OF_FORMATS):
            if self.format not in _OF_FORMATS[name]:
                todo = f"leave it out, or add --data.format {' or '.join(_OF_FORMATS[name])}"
                raise UserError(f"data.{name}", f"is given, and data.format is {self.format}", todo)
        return self


# Settings that only some values of `format` have: setting -> those formats.
_OF_FORMATS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("column", "max_tokens", "streaming", "document_mask"), ("text",)),
    **dict.fromkeys(("template", "messages"), ("chat",)),
    **dict.fromkeys(("prompt", "completion"), ("prompt",)),
    **dict.fromkeys(("packing",), ("chat", "prompt")),
}


def _with_path(raw: Any) -> Any:
    """Return the settings with the path as ``path``, if what they name as source is a path."""
    source = raw.get("source") if isinstance(raw, Mapping) else None
    if not isinstance(source, str) or source in SOURCES or not _names_files(source):
        return raw
    if raw.get("path"):
        raise UserError("data.source", f"{source} is a path, and data.path names others", "give all of them there")
    if is_hub_name(source) and source[0] not in "./~" and Path(source).is_dir():
        what = f"{source} is a folder here, and could be a data set of the hub"
        raise UserError("data.source", what, f"write ./{source}, or hf:{source}")
    return {**raw, "source": "bin" if source.lower().endswith(".bin") else "text", "path": (source,)}


def _names_files(source: str) -> bool:
    if "://" in source:
        return True
    try:
        return Path(source).expanduser().exists() or (glob.has_magic(source) and bool(glob.glob(source)))
    except (OSError, ValueError, RuntimeError):  # a name too long, with a NUL byte, or of an unknown user's home
        return False


def flags_for_secrets(data: DataConfig) -> list[str]:
    """Return flags with the addresses that have secrets, for a child process: a file of settings has none."""
    given = {"--data.path": data.path, "--data.val-path": data.val_path}
    secret = {flag: paths for flag, paths in given.items() if any(masked(path) != path for path in paths)}
    return [word for flag, paths in secret.items() for word in (flag, *paths)]


def require_data(data: DataConfig) -> None:
    """Raise UserError if the run was imported and the user has not named its data yet."""
    if data.source == UNNAMED:
        what = "the run was imported and names no data to train on"
        raise UserError("data", what, "add --data text --data.path FILES, or another source, see --help")
