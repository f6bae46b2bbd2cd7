"""What to prepare (`DataSpec`), which of its choices decide the tokens, and the default folder for the result."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.data.chat_templates import find_template
from zeroshard.data.files import name_of
from zeroshard.data.sources import check_source
from zeroshard.data.tokenizer import check_tokenizer, tokenizer_identity
from zeroshard.host.errors import UserError
from zeroshard.host.masked_addresses import masked

FORMATS = ("text", "chat", "prompt")


@dataclass(frozen=True)
class DataSpec:
    """What to prepare.

    Args:
        source: one of `SOURCES`, or a data set of the Hugging Face hub.
        paths: files, folders or globs for ``text`` and ``bin``.
        tokenizer: ``bytes``, ``gpt2``, ``bpe:N`` or ``json:PATH``. ``synthetic`` has no text and does not use it; for
            ``bin`` it is the tokenizer that made the tokens, or ``none``.
        val_fraction: share of the text used for validation, in [0, 1); see `zeroshard.data.split`.
        vocab_size, num_tokens, seed: used by ``synthetic`` only.
        max_tokens: stop after so many tokens of both splits together; 0 means no limit.
        column: the column of tables that contains the text.
        format: ``text``, or a format of fine-tuning examples: ``chat`` or ``prompt``; see `zeroshard.data.examples`.
        template: the chat template for ``chat``; see `zeroshard.data.chat_templates.find_template`.
        messages, prompt, completion: the columns of examples.

    Raises:
        UserError: a value is invalid; files are checked later, by `prepare`.
    """

    source: str = "python-stdlib"
    paths: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    val_fraction: float = 0.1
    vocab_size: int = 256
    num_tokens: int = 1_000_000
    seed: int = 0
    max_tokens: int = 0
    column: str = "text"
    format: str = "text"
    template: str = ""
    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"

    def __post_init__(self) -> None:
        check_source(self.source, self.paths)
        if (self.source, self.tokenizer) != ("bin", "none"):
            check_tokenizer(self.tokenizer)
        if not 0 <= self.val_fraction < 1:  # also refuses NaN
            raise UserError("data.val_fraction", f"{self.val_fraction} is not in [0, 1)", "give a share such as 0.1")
        if self.max_tokens < 0:
            raise UserError("data.max_tokens", f"{self.max_tokens} is negative", "give a count, or 0 for no limit")
        if not 1 <= self.vocab_size <= 1 << 32:
            raise UserError("data.vocab_size", f"{self.vocab_size} is not in [1, 2**32]", "give a number of ids")
        if self.format not in FORMATS:
            raise UserError("data.format", f"{self.format!r} is not a choice", f"choose one of {', '.join(FORMATS)}")
        if self.num_tokens < 1:
            raise UserError("data.num_tokens", f"{self.num_tokens} is less than 1", "give a number of tokens")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that each row of examples must have."""
        return (self.messages,) if self.format == "chat" else (self.prompt, self.completion)

    def identity(self) -> dict[str, Any]:
        """Return the choices that, with the source's content, decide the tokens: equal identities give equal files."""
        shared: dict[str, Any] = {
            "source": self.source,
            "val_fraction": self.val_fraction,
            "max_tokens": self.max_tokens,
        }
        if self.source == "synthetic":
            return shared | {"vocab_size": self.vocab_size, "num_tokens": self.num_tokens, "seed": self.seed}
        if self.format != "text":
            shared |= {"format": self.format, "columns": list(self.columns)}
        if self.format == "chat":
            shared["template"] = find_template(self.template, self.tokenizer).identity
        column = {} if self.column == "text" else {"column": self.column}
        return shared | {"tokenizer": tokenizer_identity(self.tokenizer)} | column


def data_dir(spec: DataSpec, root: Path | str = "data") -> Path:
    """Return the default folder for a spec, such as ``data/python-stdlib-bytes``.

    The name ends with 8 digits of a hash if the spec names the user's files or differs from the defaults, so that
    different specs have different folders; secrets in addresses do not matter.
    """
    parts = [spec.source]
    if spec.paths:
        parts.append(Path(name_of(spec.paths[0])).stem)
    if spec.source != "synthetic":
        parts.append(tokenizer_identity(spec.tokenizer))
    defaults = DataSpec(spec.source, spec.paths, spec.tokenizer)
    if spec.paths or spec.identity() != defaults.identity():
        choices = [spec.identity(), [os.path.abspath(Path(masked(path)).expanduser()) for path in spec.paths]]
        parts.append(hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:8])
    return Path(root) / re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))
