"""From text to token shards to batches; each stage is a pure function of its inputs.

`prepare` reads a source (`sources`), splits it (`split`), encodes it (`tokenizer`) and writes memory-mapped shards
(`tokens`, described by `meta`); `TokenBatches` reads them back as a function of the step (`base`, `order`).

The names are loaded on first use, so that preparing data or checking a spec does not import torch. The function
`prepare` has the name of its module and so is imported from there: ``from zeroshard.data.prepare import prepare``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.lazily import loaded

if TYPE_CHECKING:
    from zeroshard.data.base import Batches, EvalBatches, TokenBatches, Tokens, num_rows, require_enough
    from zeroshard.data.meta import DataMeta, read_meta
    from zeroshard.data.registry import SOURCES
    from zeroshard.data.spec import DataSpec, data_dir
    from zeroshard.data.tokenizer import TOKENIZERS, Tokenizer, check_tokenizer, load_tokenizer
    from zeroshard.data.tokens import TokenDataset, verify

_HOME = {
    "Batches": "base",
    "EvalBatches": "base",
    "TokenBatches": "base",
    "Tokens": "base",
    "num_rows": "base",
    "require_enough": "base",
    "DataMeta": "meta",
    "read_meta": "meta",
    "DataSpec": "spec",
    "data_dir": "spec",
    "SOURCES": "registry",
    "TOKENIZERS": "tokenizer",
    "Tokenizer": "tokenizer",
    "check_tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
    "TokenDataset": "tokens",
    "verify": "tokens",
}

__all__ = [
    "SOURCES",
    "TOKENIZERS",
    "Batches",
    "DataMeta",
    "DataSpec",
    "EvalBatches",
    "TokenBatches",
    "TokenDataset",
    "Tokenizer",
    "Tokens",
    "check_tokenizer",
    "data_dir",
    "load_tokenizer",
    "num_rows",
    "read_meta",
    "require_enough",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(f"{__name__}.{_HOME[name]}", name)
