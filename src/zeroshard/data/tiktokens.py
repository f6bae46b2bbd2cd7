"""OpenAI's vocabularies, by tiktoken. It downloads the tables at first use; we limit the time for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zeroshard.data.files import within
from zeroshard.errors import UserError

if TYPE_CHECKING:
    import tiktoken

# tiktoken's name -> number of ids, end-of-text id; listed here so that no download is needed to know them
TIKTOKEN = {
    "gpt2": (50_257, 50_256),
    "r50k_base": (50_257, 50_256),
    "p50k_base": (50_281, 50_256),
    "cl100k_base": (100_277, 100_257),
    "o200k_base": (200_019, 199_999),
}


class TiktokenTokenizer:
    """OpenAI's vocabularies, by tiktoken, which downloads their tables at first use.

    Args:
        name: a key of `TIKTOKEN`; ``gpt2`` is GPT-2's 50,257 ids (Radford et al. 2019).
        timeout_s: time limit of the download.

    Raises:
        UserError: tiktoken is not installed, or the tables cannot be downloaded within ``timeout_s``.
    """

    around: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

    def __init__(self, name: str = "gpt2", timeout_s: float = 20.0) -> None:
        self.name = name
        self._encoding = _load_tiktoken(name, timeout_s)
        self.vocab_size, self.eos_id = self._encoding.n_vocab, self._encoding.eot_token
        self.stop_ids = (self.eos_id,)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of ``text``, [n]."""
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.int64)

    encode_piece = encode

    @property
    def ranks(self) -> Mapping[bytes, int]:
        """The id of each byte string, without the special tokens."""
        return self._encoding._mergeable_ranks

    @property
    def pattern(self) -> str:
        """The regular expression that splits text into the pieces that are encoded separately."""
        return self._encoding._pat_str

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens, which plain text never gets."""
        return self._encoding._special_tokens

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of ids."""
        return self._encoding.decode(np.asarray(ids, dtype=np.int64).tolist())


def _load_tiktoken(name: str, timeout_s: float) -> tiktoken.Encoding:
    try:
        import tiktoken
    except ImportError:
        raise UserError("data.tokenizer", f"{name} needs the package tiktoken", "pip install tiktoken") from None
    try:
        return within(timeout_s, lambda: tiktoken.get_encoding(name))
    except TimeoutError:
        why = f"no answer in {timeout_s:g} s"
    except (OSError, ValueError) as error:  # no connection; a table with the wrong checksum
        why = type(error).__name__
    todo = "go online once, or use bytes or bpe:N"
    raise UserError("data.tokenizer", f"the tables of {name} cannot be fetched ({why})", todo)
