"""From text to token shards to batches; each stage is a pure function of its inputs.

`prepare` reads a source (`sources`), splits it (`split`), encodes it (`tokenizer`) and writes memory-mapped shards
(`tokens`, described by `meta`); `RowBatches` reads them back as a function of the step (`batches`, `order`).

The names are loaded on first use, so that preparing data or checking a spec does not import torch. The function
`prepare` has the name of its module and so is imported from there: ``from zeroshard.data.prepare import prepare``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.data.base import Batches as Batches
    from zeroshard.data.base import TextRows as TextRows
    from zeroshard.data.base import Tokens as Tokens
    from zeroshard.data.base import num_rows as num_rows
    from zeroshard.data.base import require_enough as require_enough
    from zeroshard.data.batches import EvalBatches as EvalBatches
    from zeroshard.data.batches import RowBatches as RowBatches
    from zeroshard.data.meta import DataMeta as DataMeta
    from zeroshard.data.meta import read_meta as read_meta
    from zeroshard.data.registry import SOURCES as SOURCES
    from zeroshard.data.spec import DataSpec as DataSpec
    from zeroshard.data.spec import data_dir as data_dir
    from zeroshard.data.tokenizer import TOKENIZERS as TOKENIZERS
    from zeroshard.data.tokenizer import Tokenizer as Tokenizer
    from zeroshard.data.tokenizer import check_tokenizer as check_tokenizer
    from zeroshard.data.tokenizer import load_tokenizer as load_tokenizer
    from zeroshard.data.tokens import TokenDataset as TokenDataset
    from zeroshard.data.tokens import verify as verify

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
