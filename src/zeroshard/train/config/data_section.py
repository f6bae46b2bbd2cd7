"""The table ``[data]`` of a run's settings."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from zeroshard.data.registry import SOURCES, is_hub_name
from zeroshard.errors import UserError, shown
from zeroshard.train.config.registered import SourceName
from zeroshard.train.config.sections import SHORTHANDS, Config, Count

UNNAMED = "unnamed"  # the source of an imported run: the user has to name its data before training
MIXED = ("text", "bin")  # sources that read files


class DataConfig(Config):
    """Settings of the data: which text to train on, how to tokenize it, and where to keep the tokens."""

    source: SourceName = Field(
        "python-stdlib",
        min_length=1,
        description=f"{', '.join(SOURCES)}; OWNER/NAME[:CONFIGURATION][@SPLIT] of the Hugging Face hub; a path, as "
        "--data mine.txt; or module:name of your own. bin: tokens of nanoGPT or llm.c.",
    )
    path: tuple[str, ...] = Field(
        (), description="Files, folders, globs or addresses to read: text, .parquet, .jsonl[.gz|.zst], .bin."
    )
    mix: tuple[str, ...] = Field(
        (),
        description="In place of path: sources with the share of rows that each has in training, as maths.jsonl=0.3 "
        "code.jsonl=0.7; shares are divided by their sum. hf:OWNER/NAME=0.5 is a data set of the hub.",
    )
    column: str = Field("text", min_length=1, description="Column of .parquet, or key of .jsonl, that has the text.")
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
    document_mask: bool = Field(False, description="Attention stays inside a document; the tokenizer must end them.")
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

    @field_validator("mix", mode="before")
    @classmethod
    def _mix_from_table(cls, raw: Any) -> Any:
        return [f"{path}={weight}" for path, weight in raw.items()] if isinstance(raw, Mapping) else raw

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each source in ``mix``, by path, as the user gave it (not normalised)."""
        return {path: float(weight) for path, _, weight in (each.rpartition("=") for each in self.mix)}

    @model_validator(mode="after")
    def _sources_have_weights(self) -> Self:
        paths = []
        for each in self.mix:
            path, _, weight = each.rpartition("=")
            if not path or not _is_number(weight):
                raise UserError("data.mix", f"{shown(each)} is no PATH=WEIGHT", "write each as maths.jsonl=0.3")
            if not 0 <= float(weight) < math.inf:
                raise UserError("data.mix", f"{path} has the weight {weight}", "give a number of 0 or more")
            if path in paths:
                raise UserError("data.mix", f"{path} is given twice", "give each source once")
            paths.append(path)
        if self.mix and not sum(self.weights.values()):
            raise UserError("data.mix", "the weights sum to 0", "give at least one source a weight above 0")
        return self

    @model_validator(mode="after")
    def _can_be_mixed(self) -> Self:
        for path in self.path:
            if _is_number(path.rpartition("=")[2]) and "=" in path and not Path(path).exists():
                raise UserError(
                    "data.path", f"there is no {path}", "give sources with weights by --data.mix PATH=WEIGHT"
                )
        if not self.mix:
            return self
        if self.source not in MIXED:
            what = f"mixes files, and the source is {self.source}"
            raise UserError("data.mix", what, f"add --data text, or another of {', '.join(MIXED)}")
        others = {"path": "the sources are those of data.mix", "streaming": "a stream is not mixed"}
        others["max_tokens"] = "the weights say how much of each source is trained on"
        for name, why in others.items():
            if getattr(self, name):
                raise UserError(f"data.{name}", f"is given with data.mix, and {why}", "leave one of the two out")
        if self.tokenizer.startswith("bpe:"):
            todo = "train one by `zeroshard prepare` on some of them, and give its tokenizer.json as json:PATH"
            raise UserError("data.tokenizer", f"{self.tokenizer} would be another one for each source", todo)
        return self

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
        fields = type(self).model_fields
        given = {name for name in fields if getattr(self, name) != fields[name].default}
        wrong = next(
            (name for name, formats in _OF_FORMATS.items() if name in given and self.format not in formats), ""
        )
        if wrong:
            formats = " or ".join(_OF_FORMATS[wrong])
            what = f"is given, and data.format is {self.format}"
            raise UserError(f"data.{wrong}", what, f"leave it out, or add --data.format {formats}")
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
    if raw.get("path") or raw.get("mix"):
        others = "data.path" if raw.get("path") else "data.mix"
        raise UserError("data.source", f"{source} is a path, and {others} names others", "give all of them there")
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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def require_data(data: DataConfig) -> None:
    """Raise UserError if the run was imported and the user has not named its data yet."""
    if data.source == UNNAMED:
        what = "the run was imported and names no data to train on"
        raise UserError("data", what, "add --data text --data.path FILES, or another source, see --help")
