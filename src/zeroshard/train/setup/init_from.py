"""``--init-from``: start a run from trained weights, with a schedule, data and an optimizer of its own (fine-tuning).

The weights come from a run, a checkpoint, or a Hugging Face folder, such as `zeroshard export` writes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroshard import checkpoint
from zeroshard.checkpoint.hf_weight_reader import reader_of
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.read_as import MergedWeights, NewAdapters, WeightsAlone, transposed_weights
from zeroshard.checkpoint.with_base import OfCheckpoint, WithBase, initial_weights
from zeroshard.comm import Communicator
from zeroshard.comm.agree import agreement
from zeroshard.data.meta import DataMeta
from zeroshard.data.tokenizer import TOKENIZER_FILE, BpeTokenizer, make_tokenizer
from zeroshard.host.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.models.hugging_face.folder import PREFIX, config_text, is_hugging_face, source_of, weight_folder
from zeroshard.models.hugging_face.gpt2_llama_conversion import from_hf_config
from zeroshard.models.lora import initial_adapters
from zeroshard.optim.named_shards import ShardReader
from zeroshard.parallel import Strategy
from zeroshard.settings.optimizer import WEIGHTS_IN_BF16
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.data_section import DataConfig
from zeroshard.train.config.model_section import ModelConfig
from zeroshard.train.config.named_code import require_asked
from zeroshard.train.config.toml import load_config
from zeroshard.train.setup import resume
from zeroshard.train.setup.assemble import lora_of, model_table
from zeroshard.train.setup.hugging_face import with_tokenizer_of
from zeroshard.train.setup.run_folder import kept_meta, tokenizer_folder
from zeroshard.train.state.folders import checkpoint_folder
from zeroshard.train.state.saved_run import saved_run

SeenAs = Callable[[ShardReader], ShardReader]


def with_initial_run(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with the model and tokenizer of its ``init_from``, unless it names its own.

    Raises:
        UserError: ``init_from`` has no run, checkpoint or model; or ``config`` names a different model or tokenizer.
    """
    source = Path(config.init_from)
    if not config.init_from or (config.resume != "none" and not source.exists()):
        return config
    if is_hugging_face(config.init_from) or (source / "config.json").is_file():
        return _with_hugging_face(config, source_of(config.init_from))
    run = source
    if (source / MANIFEST).is_file():
        saved = _saved_config(source)
        if saved.get("model") is None:  # not of `zeroshard train`; names and shapes are compared when it is loaded
            return config
        theirs, data = validate(ModelConfig, saved["model"]), validate(DataConfig, saved.get("data", {}))
        run, named_in = source.parent.parent, source
    elif (source / "config.toml").is_file():
        named_in = source / "config.toml"
        trained = load_config(named_in)
        theirs, data = trained.model, trained.data
    else:
        what = f"{source} holds no run (no config.toml), no checkpoint and no Hugging Face model"
        raise UserError("init_from", what, "give a run as runs/NAME, a checkpoint in it, or a folder with config.json")
    require_asked({"model": theirs.model_dump()}, {f"model.{name}" for name in config.model.model_fields_set}, named_in)
    kept = tokenizer_folder(run)
    meta = kept_meta(run, data)
    # A model of transformers may have more ids than its tokenizer, so its vocab_size is left alone.
    if meta is not None and not theirs.vocab_size and not is_hugging_face(theirs.name):
        theirs = theirs.model_copy(update={"vocab_size": meta.vocab_size})
    config = _with_model(config, theirs)
    if meta is None or meta.tokenizer == "none":
        return config
    data = config.data
    if "tokenizer" in data.model_fields_set:
        if not _is_of(meta, data.tokenizer):
            what = f"{data.tokenizer} gives other ids than {run} was trained with ({meta.tokenizer})"
            raise UserError("data.tokenizer", what, "leave it out: the run's own is taken")
        return config
    own = f"json:{kept / TOKENIZER_FILE}" if meta.tokenizer_sha256 else meta.tokenizer
    return config.model_copy(update={"data": data.model_copy(update={"tokenizer": own})})


def _with_model(config: TrainConfig, theirs: ModelConfig) -> TrainConfig:
    """Return ``config`` with the model ``theirs``, keeping the settings that it names itself.

    Raises a UserError if these differ from ``theirs``, except activation checkpointing and dropout.
    """
    named = {name: getattr(config.model, name) for name in config.model.model_fields_set}
    model = theirs.model_copy(update=named)
    resume.check_model(theirs.model_dump(), model.model_dump(), free=("activation_checkpointing", "dropout"))
    return config.model_copy(update={"model": model})


def _with_hugging_face(config: TrainConfig, source: str) -> TrainConfig:
    """Return ``config`` with the model of a Hugging Face folder or name.

    The model is `transformers`' own if ``config`` names an ``hf:`` model, else the equivalent GPT-2 or LLaMA of ours.
    """
    if is_hugging_face(config.model.name):
        theirs = ModelConfig(name=PREFIX + source, trust_remote_code=config.model.trust_remote_code)
    else:
        text = config_text(source)
        try:
            theirs = model_table(from_hf_config(json.loads(text)))
        except UserError as error:
            what = f"{source} is no GPT-2 or LLaMA that our models compute ({error.field} {error.what})"
            raise UserError("init_from", what, f"give it as --model hf:{source} instead") from None
    return with_tokenizer_of(source, _with_model(config, theirs))


def load_initial_weights(init_from: str, model: LanguageModel, strategy: Strategy, comm: Communicator) -> None:
    """Load the weights of ``init_from`` into ``strategy``, without optimizer state. Collective.

    Of a run, its newest undamaged checkpoint is loaded. Adapters in it are merged into the weights; adapters of
    ``model`` start as in a new run.

    Raises:
        UserError: there are no weights, or they belong to another model.
    """
    source = Path(init_from)
    if is_hugging_face(init_from) or (source / "config.json").is_file():
        source = weight_folder(source_of(init_from))
        with agreement(comm, phase="loading"):
            reader = _as_initial(model, reader_of(source, model))
            WeightsAlone(strategy, ("param", "buffer")).load_named_shards(reader)
    else:
        run, is_run = source, not (source / MANIFEST).is_file()
        if is_run:
            try:
                newest = resume.choose(comm, "auto", checkpoint_folder(run))
            except UserError as error:
                raise UserError("init_from", error.what, "restore one from a copy, or begin from another run") from None
            if newest is None:
                raise UserError("init_from", f"{run} has no complete checkpoint yet", "let it train up to one first")
            source = newest
        _load_checkpoint(source, model, strategy, verified=is_run)
    if comm.rank == 0:
        print(f"init-from: the weights of {source}", file=sys.stderr, flush=True)


def _load_checkpoint(path: Path, model: LanguageModel, strategy: Strategy, *, verified: bool) -> None:
    try:
        seen_merged = merged(_saved_config(path), model)
        target = WeightsAlone(strategy, ("param", "buffer"), lambda reader: _as_initial(model, seen_merged(reader)))
        checkpoint.load(path, target, verified=verified, settings=False)
    except UserError:
        raise
    except ValueError as error:
        raise UserError("init_from", f"{path}: {error}", "name the model of that run, or none") from None


def _saved_config(path: Path) -> Mapping[str, Any]:
    """The configuration of the run that wrote a checkpoint; empty if `zeroshard train` did not write it."""
    try:
        return saved_run(path).get("config", {})
    except UserError as error:
        raise UserError("init_from", error.what, error.todo) from None


def _as_initial(model: LanguageModel, reader: ShardReader) -> ShardReader:
    """Wrap a ``reader`` of weights so that they read as initial ones: adapters of ``model``, if any, begin anew."""
    return reader if model.lora is None else NewAdapters(reader, initial_adapters(model))


def whole(config: TrainConfig, model: LanguageModel, *, rounded: bool) -> SeenAs:
    """Return what shows a checkpoint of the run ``config`` with its base, if it has none; see `WithBase`.

    ``model``: that of the run, on any device; only names, shapes and initial values are used.
    """
    frozen = config.frozen_format
    if frozen is None:
        return lambda reader: reader
    narrow = config.optimizer in WEIGHTS_IN_BF16 and config.dtype == "bfloat16"
    dtype = torch.bfloat16 if narrow else torch.float32
    base = _base_of(config.init_from, model)
    return partial(WithBase, base=base, form=frozen.form, dtype=dtype, rounded=rounded)


def merged(settings: Mapping[str, Any], model: LanguageModel) -> SeenAs:
    """Return what shows a checkpoint of a run with these settings with its adapters, if any, merged into its base."""
    if not settings:
        return lambda reader: reader
    config = validate(TrainConfig, settings)
    seen_whole, lora = whole(config, model, rounded=False), lora_of(config.lora)
    if lora is None:
        return seen_whole
    return lambda reader: MergedWeights(seen_whole(reader), lora.scale, transposed_weights(model))


def _base_of(init_from: str, model: LanguageModel) -> ShardReader:
    """The weights with which a run began, by their names without adapters."""
    source = Path(init_from)
    if not init_from:
        return initial_weights(model)
    if is_hugging_face(init_from) or (source / "config.json").is_file():
        return reader_of(weight_folder(source_of(init_from)), model)
    newest = source if (source / MANIFEST).is_file() else checkpoint.latest(checkpoint_folder(source))
    if newest is None:
        what = f"{source} is where the base of the run came from, and holds no checkpoint now"
        raise UserError("init_from", what, "restore it")
    return OfCheckpoint(newest, merged(saved_run(newest).get("config") or {}, model))


def _is_of(meta: DataMeta, tokenizer: str) -> bool:
    """Whether ``tokenizer``, a setting, is the tokenizer that ``meta`` describes, which a run has kept."""
    if not meta.tokenizer_sha256 or not tokenizer.startswith("json:"):
        return meta.tokenizer == tokenizer and not tokenizer.startswith("bpe:")
    found = make_tokenizer(tokenizer, ())
    return isinstance(found, BpeTokenizer) and (
        hashlib.sha256(found.to_json().encode()).hexdigest() == meta.tokenizer_sha256
    )
