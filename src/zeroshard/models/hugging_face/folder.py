"""Where the files of ``hf:FOLDER_OR_NAME`` are: a folder of this machine, or a model of the Hugging Face hub.

What the hub has is fetched once, by its own client, into its own cache; ``HF_HUB_OFFLINE=1`` has it ask nobody.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from zeroshard.errors import UserError
from zeroshard.regular_files import read_text

PREFIX = "hf:"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft
# What says how text becomes tokens and how a model is asked for text; nothing of it is executed.
TEXT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_hugging_face(name: str) -> bool:
    """Whether a model's name is ``hf:`` and something."""
    return name.startswith(PREFIX)


def source_of(name: str) -> str:
    """``FOLDER_OR_NAME`` of ``hf:FOLDER_OR_NAME``.

    Raises:
        UserError: it is empty.
    """
    source = name.removeprefix(PREFIX)
    if not source.strip():
        raise UserError("model", f"{name!r} names no model", "write hf:FOLDER, or hf:OWNER/NAME of the hub")
    return source


def config_text(source: str) -> str:
    """``config.json`` of a model, as one line of JSON.

    Raises:
        UserError: there is no such folder or model, it has no such file, or the file is damaged.
    """
    path = _found(source, CONFIG)
    if path is None or path.with_name(ADAPTER_CONFIG).is_file():
        _refuse_adapters(source)
    if path is None:
        raise UserError("model", f"{source} has no {CONFIG}", "give the folder of a Hugging Face model")
    return json.dumps(read_json(path), separators=(",", ":"))


def _refuse_adapters(source: str) -> None:
    """Raise UserError where ``source`` holds adapters of `peft` in the place of a model."""
    path = _found(source, ADAPTER_CONFIG)
    if path is not None:
        raise only_adapters("model", source, path)


def only_adapters(field: str, source: str, path: Path) -> UserError:
    """What to raise where ``source`` was to be a model, and holds adapters of `peft`, as the file ``path`` says."""
    base = read_json(path).get("base_model_name_or_path") or "their base model"
    todo = "write both as one model: peft's merge_and_unload() and save_pretrained(), then give that folder"
    return UserError(field, f"{source} holds adapters of {base}, and no whole model", todo)


def weight_folder(source: str) -> Path:
    """A folder with the weights of a model; those of the hub are fetched."""
    return _as_folder(source) or _snapshot(source, WEIGHT_FILES)


def text_files(source: str) -> list[Path]:
    """Those of `TEXT_FILES` that a model has; those of the hub are fetched."""
    folder = _as_folder(source) or _snapshot(source, TEXT_FILES)
    return [folder / name for name in TEXT_FILES if (folder / name).is_file()]


def copy_text_files(source: str, to: Path) -> None:
    """Copy `text_files` into the new folder ``to``."""
    to.mkdir(exist_ok=True)
    for path in text_files(source):
        shutil.copyfile(path, to / path.name)


def tokenizer_file(source: str) -> Path | None:
    """``tokenizer.json`` of a model, with all other `text_files` beside it; None where it has none.

    What reads a chat template looks for it there; a file that is fetched alone has none beside it.
    """
    return next((path for path in text_files(source) if path.name == "tokenizer.json"), None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise UserError("model", f"{path} cannot be read ({error.strerror})", "check the folder") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError("model", f"{path} is not a JSON object", "fetch it again")
    return content


def _as_folder(source: str) -> Path | None:
    """The folder that ``source`` is; None where it is a name of the hub.

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
    """Whether the hub's host has an address, or a proxy would look for it.

    Where there is no network the hub's client tries again for half a minute, for each file.
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
    """What to raise where `transformers` is not installed."""
    return UserError("model", "hf: models need the package transformers", "pip install 'zeroshard[hf]'")


def _not_had(source: str, error: Exception) -> UserError:
    """What is said of a model that the hub does not give."""
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
