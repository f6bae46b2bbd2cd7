"""Copies from a Hugging Face model into a run what the run needs of it: configuration, tokenizer and text files.

The run folder has all of them (in ``config.toml`` and ``hugging-face/``). So to resume, evaluate or export the run,
neither the original folder nor the hub is needed.
"""

from __future__ import annotations

from pathlib import Path

from zeroshard.data.registry import source_entry
from zeroshard.data.tokenizer import TOKENIZER_FILE, Tokenizer, known_vocab_size, read_tokenizer, tokenizer_identity
from zeroshard.host.errors import UserError
from zeroshard.models.hugging_face.folder import (
    config_text,
    copy_text_files,
    is_hugging_face,
    source_of,
    tokenizer_file,
    weight_folder,
)
from zeroshard.models.hugging_face.weights import find_tensors
from zeroshard.models.presets import model_config
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.assemble import model_overrides


def kept_folder(run_folder: Path) -> Path:
    """The folder inside a run folder for the model's tokenizer and other text files."""
    return run_folder / "hugging-face"


def with_model_files(config: TrainConfig) -> TrainConfig:
    """For an ``hf:`` model, fill in the text of its ``config.json`` and its tokenizer if ``config`` lacks them.

    Raises:
        UserError: there is no such model, it has no weights to start from, or the named tokenizer does not fit it.
    """
    name = config.model.name
    if not is_hugging_face(name) or config.model.config_json:
        return with_kept_tokenizer(config, Path(config.out))
    source = source_of(name)
    text = config_text(source)
    model_config(name, overrides=model_overrides(config.model))
    model = config.model.model_copy(update={"config_json": text})
    if not model.from_config and config.resume == "none":
        find_tensors(weight_folder(source))
    return with_tokenizer_of(source, config.model_copy(update={"model": model}))


def with_kept_tokenizer(config: TrainConfig, run_folder: Path) -> TrainConfig:
    """Return ``config`` with the tokenizer file that the run has kept, if the file that it names is missing."""
    own = kept_folder(run_folder) / TOKENIZER_FILE
    named = config.data.tokenizer
    if not named.startswith("json:") or Path(named.removeprefix("json:")).is_file() or not own.is_file():
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": f"json:{own}"})})


def load_model_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of ``hf:FOLDER_OR_NAME``.

    Raises:
        UserError: the model has no ``tokenizer.json``.
    """
    file = tokenizer_file(source_of(name))
    if file is None:
        raise UserError("run", f"{name} has no tokenizer.json", "take the folder of a whole model")
    return read_tokenizer(file)


def with_tokenizer_of(source: str, config: TrainConfig) -> TrainConfig:
    """Return ``config`` with the tokenizer of the model ``source`` (a folder or hub name), unless it names one.

    Raises:
        UserError: the model has no tokenizer; or the tokenizer that is named gives other ids.
    """
    data = config.data
    if not (source_entry(data.source).has_text or data.streaming):
        return config
    file = tokenizer_file(source)
    if "tokenizer" not in data.model_fields_set:
        if file is None:
            what = f"{source} has no tokenizer.json"
            raise UserError("data.tokenizer", what, "name one, as --data.tokenizer json:PATH")
        return config.model_copy(update={"data": data.model_copy(update={"tokenizer": f"json:{file}"})})
    if file is not None and not config.model.from_config:
        own = f"json:{file}"
        others = tokenizer_identity(data.tokenizer) != tokenizer_identity(own)
        # Two of the same size may be one tokenizer in two formats.
        if data.tokenizer.startswith("bpe:") or (others and known_vocab_size(data.tokenizer) != known_vocab_size(own)):
            what = f"{data.tokenizer} gives other ids than {source} was trained on"
            raise UserError("data.tokenizer", what, "leave it out, or add --model.from-config to train from scratch")
    return config


def keep_text_files(config: TrainConfig, run_folder: Path) -> None:
    """Copy the model's tokenizer and other text files into the run folder, unless they are there already."""
    folder = kept_folder(run_folder)
    if is_hugging_face(config.model.name) and not folder.is_dir():
        source = source_of(config.model.name)
        copy_text_files(source, folder)
        if (file := tokenizer_file(source)) is not None:  # its end of text may be named by the config.json alone
            read_tokenizer(file).keep_special_tokens(folder)
