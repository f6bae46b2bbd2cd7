"""nanoGPT's ``meta.pkl``: the characters of a character-level data set, and their ids.

It is a pickle, and a pickle may call anything that can be imported. So we read its operations before any of them is
executed, and refuse all except those that make dictionaries, lists, text, numbers and truth values; none of these
imports, calls or builds an object.

https://github.com/karpathy/nanoGPT/blob/master/data/shakespeare_char/prepare.py
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zeroshard.errors import UserError
from zeroshard.regular_files import read_bytes

if TYPE_CHECKING:
    import tokenizers

_MOST_BYTES = 1 << 25  # a file with all characters of Unicode has 17 MB
_CONTAINERS = {"MARK", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"}
_CONTAINERS |= {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE", "NEWTRUE", "NEWFALSE"}
_TEXT = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE"}
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2"}
_MEMORY = {"GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_ALLOWED = _CONTAINERS | _TEXT | _NUMBERS | _MEMORY | {"PROTO", "FRAME", "STOP"}


class _Unpickler(pickle.Unpickler):
    """Refuses to make objects of classes, a second safeguard after `_ALLOWED`."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it holds {module_name}.{global_name}")


def read_characters(path: Path) -> dict[str, int]:
    """Return the id of each character, from ``stoi`` and ``itos`` of a ``meta.pkl``.

    Raises:
        UserError: it cannot be read, contains more than plain values, or is not a set of characters.
    """
    todo = "give the meta.pkl of a character-level set of nanoGPT"
    try:
        found = _plain_values(read_bytes(path, _MOST_BYTES))
    except OSError as error:
        raise UserError("data.tokenizer", f"{path} cannot be read ({error.strerror})", todo) from None
    except (ValueError, IndexError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError("data.tokenizer", f"{path} is no pickle of plain values ({error})", todo) from None
    meta = found if isinstance(found, dict) else {}
    stoi, itos = meta.get("stoi"), meta.get("itos")
    if not isinstance(stoi, dict) or not stoi or not all(_is_character(text) for text in stoi):
        raise UserError("data.tokenizer", f"{path} has no `stoi` from characters to ids", todo)
    if not all(type(id_) is int for id_ in stoi.values()) or sorted(stoi.values()) != list(range(len(stoi))):
        raise UserError("data.tokenizer", f"{path}: the ids of `stoi` are not 0 to {len(stoi) - 1}", todo)
    if itos != {id_: text for text, id_ in stoi.items()}:
        raise UserError("data.tokenizer", f"{path}: `itos` is not the inverse of `stoi`", todo)
    return stoi


def character_tokenizer(stoi: dict[str, int]) -> tokenizers.Tokenizer:
    """Return a tokenizer of the tokenizers library: each character is a token, and one without an id is an error."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # The library refuses an unknown character if ``unk_token`` is not in the vocabulary.
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=stoi, unk_token="no character"))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _plain_values(content: bytes) -> Any:
    for operation, argument, _ in pickletools.genops(content):
        if operation.name not in _ALLOWED:
            raise pickle.UnpicklingError(f"it has the operation {operation.name}")
        if operation.name.endswith("PUT") and int(str(argument)) > len(content):
            raise pickle.UnpicklingError("it asks for more memory than it has bytes")
    return _Unpickler(io.BytesIO(content)).load()


def _is_character(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 1 and not 0xD800 <= ord(text) < 0xE000
