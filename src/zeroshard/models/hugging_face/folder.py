"""Find the files of ``hf:FOLDER_OR_NAME``: in a local folder, or on the Hugging Face hub.

The hub's own client downloads files once, into its own cache. With ``HF_HUB_OFFLINE=1`` it contacts no server.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import copy_inside, folder_inside, read_text

PREFIX = "hf:"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft
# Files that define the tokenizer, the chat template and the settings of generation; none of them is executed.
TEXT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_hugging_face(name: str) -> bool:
    """Whether a model's name starts with ``hf:``."""
    return name.startswith(PREFIX)


def source_of(name: str) -> str:
    """Return ``FOLDER_OR_NAME`` of ``hf:FOLDER_OR_NAME``.

    Raises:
        UserError: nothing follows ``hf:``.
    """
    source = name.removeprefix(PREFIX)
    if not source.strip():
        raise UserError("model", f"{name!r} names no model", "write hf:FOLDER, or hf:OWNER/NAME of the hub")
    return source


def config_text(source: str) -> str:
    """Return a model's ``config.json`` as one line of JSON.

    Raises:
        UserError: there is no such folder or model, it contains adapters instead of a model, it has no such file, or
            the file is damaged, or says that weights are quantised.
    """
    path = _found(source, CONFIG)
    if path is None or path.with_name(ADAPTER_CONFIG).is_file():
        _refuse_adapters(source)
    if path is None:
        raise UserError("model", f"{source} has no {CONFIG}", "give the folder of a Hugging Face model")
    raw = read_json(path)
    require_unquantised("model", source, raw)
    return json.dumps(raw, separators=(",", ":"))


def require_unquantised(field: str, source: object, raw: Mapping[str, Any]) -> None:
    """Raise UserError if ``raw``, a config.json, says that weights are codes: of bitsandbytes, GPTQ, AWQ, ..."""
    how = raw.get("quantization_config")
    if how:
        method = how.get("quant_method") if isinstance(how, Mapping) else ""
        what = f"the weights of {source} are quantised already ({method or 'quantization_config'})"
        todo = "take the model before quantisation; --lora 16 --base nf4 keeps it in four bits under adapters"
        raise UserError(field, what, todo)


def _refuse_adapters(source: str) -> None:
    """Raise UserError if ``source`` contains adapters of `peft` instead of a model."""
    path = _found(source, ADAPTER_CONFIG)
    if path is not None:
        raise only_adapters("model", source, path)


def only_adapters(field: str, source: str, path: Path) -> UserError:
    """Return the error for a ``source`` that contains adapters, described by ``path``, where a model is expected."""
    base = read_json(path).get("base_model_name_or_path") or "their base model"
    todo = "write both as one model: peft's merge_and_unload() and save_pretrained(), then give that folder"
    return UserError(field, f"{source} holds adapters of {base}, and no whole model", todo)


def weight_folder(source: str) -> Path:
    """Return a folder with a model's weights, which are downloaded if the model is on the hub."""
    return _as_folder(source) or _snapshot(source, WEIGHT_FILES)


def text_files(source: str) -> list[Path]:
    """Return the paths of those `TEXT_FILES` that a model has; they are downloaded if the model is on the hub."""
    folder = _as_folder(source) or _snapshot(source, TEXT_FILES)
    return [folder / name for name in TEXT_FILES if (folder / name).is_file()]


def copy_text_files(source: str, to: Path) -> None:
    """Copy `text_files` into the new folder ``to``."""
    folder_inside(to.parent, to.name)
    for path in text_files(source):
        copy_inside(path, to)


def tokenizer_file(source: str) -> Path | None:
    """Return the path of a model's ``tokenizer.json``; None if it has none.

    All `text_files` are fetched with it, because the reader of a chat template looks for it in the same folder.
    """
    return next((path for path in text_files(source) if path.name == "tokenizer.json"), None)


def read_json(path: Path, field: str = "model") -> dict[str, Any]:
    """Read a JSON object from a file; ``field`` names the setting that led to it, for error messages.

    Raises:
        UserError: the file cannot be read, or does not contain a JSON object.
    """
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise UserError(field, f"{path} cannot be read ({error.strerror})", "check the folder") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(field, f"{path} is not a JSON object", "fetch it again")
    return content


def _as_folder(source: str) -> Path | None:
    """Return ``source`` as a local folder; None if it can be a name on the hub.

    Raises:
        UserError: it is neither.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError("model", f"{source} is a file", "give the folder that it lies in")
    if not _NAME.fullmatch(source):
        raise UserError("model", f"there is no folder {source}", "give a folder, or OWNER/NAME of the Hugging Face hub")
    return None


def _found(source: str, file: str) -> Path | None:
    folder = _as_folder(source)
    if folder is not None:
        return folder / file if (folder / file).is_file() else None
    hub = _hub()
    try:
        return Path(hub.hf_hub_download(source, file, local_files_only=not _may_be_reached(hub)))
    except Exception as error:  # noqa: BLE001 -- the client raises its own and those of two HTTP libraries
        if type(error).__name__ in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            return None
        raise _not_had(source, error) from None


def _snapshot(source: str, patterns: tuple[str, ...]) -> Path:
    hub = _hub()
    try:
        alone = not _may_be_reached(hub)
        return Path(hub.snapshot_download(source, allow_patterns=list(patterns), local_files_only=alone))
    except Exception as error:  # noqa: BLE001 -- as above
        raise _not_had(source, error) from None


def _hub() -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError:
        raise missing_transformers() from None


def _may_be_reached(hub: Any) -> bool:
    """Whether the hub's host name resolves, or a proxy is set that would resolve it.

    Without a network, the hub's client would retry for half a minute for each file.
    """
    endpoint = urlsplit(hub.constants.ENDPOINT)
    if getproxies():
        return True
    try:
        socket.getaddrinfo(endpoint.hostname, endpoint.port)
    except OSError:
        return False
    return True


def missing_transformers() -> UserError:
    """Return the error for `transformers` not being installed, or being older than release 5."""
    return UserError("model", "hf: models need the package transformers, from release 5", "pip install 'zeroshard[hf]'")


def _not_had(source: str, error: Exception) -> UserError:
    """Return the error for a model that could not be downloaded from the hub."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        what, todo = "is gated, and no token of yours opens it", "ask for access on its page, then `hf auth login`"
    elif kind == "RepositoryNotFoundError":
        what = "is no folder here, and no model of the hub that you may see"
        todo = "check the name, or `hf auth login` for a private one"
    else:
        what = f"is no folder here, is not in the hub's cache, and the hub was not reached ({kind})"
        todo = "check the name and the connection, or give a folder"
    return UserError("model", f"{source} {what}", todo)
