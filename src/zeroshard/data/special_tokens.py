"""Reads what the files beside a ``tokenizer.json`` say of a model: its special tokens, and the ids that end a text.

    tokenizer_config.json, special_tokens_map.json     special tokens by name: eos_token ends a document
    generation_config.json, config.json                eos_token_id: one id, or several, at which generation ends

A vocabulary alone does not say which of its tokens ends a text: Gemma's ``</s>`` is an HTML tag and its end is
``<eos>``, and DeepSeek's end is in no other vocabulary. So everything that needs such a token (training data, chat
templates, generation, evaluation, import, export) reads it by `special_tokens_of`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import read_text, write_inside

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
_MODEL_CONFIG = "config.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class SpecialTokens:
    """What a model's files say of its special tokens."""

    named: Mapping[str, str] = field(default_factory=dict)  # the text of special tokens by name, such as ``eos_token``
    # ids at which generation ends, the first of them the most important; empty if no file names any
    end_ids: tuple[int, ...] = ()


def special_tokens_of(folder: Path) -> SpecialTokens:
    """Return what the files in ``folder`` say; nothing if there are none.

    Raises:
        UserError: a file cannot be read.
    """
    named: dict[str, str] = {}
    for file in (TOKENS_FILE, TOKENIZER_CONFIG):  # the latter takes precedence
        for name, token in json_object(folder / file).items():
            content = token.get("content") if isinstance(token, Mapping) else token
            if name in _NAMES and isinstance(content, str):
                named[name] = content
    for file in (GENERATION_CONFIG, _MODEL_CONFIG):
        found = json_object(folder / file).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if end_ids := tuple(id_ for id_ in ids if isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0):
            return SpecialTokens(named, end_ids)
    return SpecialTokens(named)


def write_special_tokens(folder: Path, eos_token: str | None, stop_ids: tuple[int, ...]) -> None:
    """Make `special_tokens_of` of ``folder`` return this ``eos_token`` and these ids; other content of files stays."""
    for file, key, value in (
        (TOKENIZER_CONFIG, "eos_token", eos_token),
        (GENERATION_CONFIG, "eos_token_id", list(stop_ids)),
    ):
        if value:
            content = {**json_object(folder / file), key: value}
            write_inside(folder, file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def json_object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file, or another value in it.

    Raises:
        UserError: the file cannot be read.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("data.tokenizer", f"{path} cannot be read ({error})", "fetch it again") from None
    return found if isinstance(found, Mapping) else {}
