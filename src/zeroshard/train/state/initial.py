"""``--init-from RUN``: weights of another run, and from there a schedule, data and an optimizer of this run's own."""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from pathlib import Path

from zeroshard import checkpoint
from zeroshard.comm import Communicator
from zeroshard.data.meta import DataMeta, read_meta
from zeroshard.data.tokenizer import TOKENIZER_FILE, BpeTokenizer, make_tokenizer
from zeroshard.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.models.hugging_face.folder import is_hugging_face
from zeroshard.models.lora import initial_adapters
from zeroshard.parallel import Strategy
from zeroshard.train.config.config import TrainConfig, load_config
from zeroshard.train.config.sections import LoraConfig
from zeroshard.train.loop.run import checkpoint_folder
from zeroshard.train.setup.assemble import lora_of
from zeroshard.train.setup.run_folder import tokenizer_folder
from zeroshard.train.state import resume
from zeroshard.train.state.merged_weights import MergedWeights, NewAdapters, transposed_weights
from zeroshard.train.state.weights_alone import WeightsAlone
from zeroshard.zero.state.named_shards import ShardReader


def with_initial_run(config: TrainConfig) -> TrainConfig:
    """``config`` with the model and the tokenizer of the run that it begins from, where it does not name its own.

    Raises:
        UserError: there is no such run; or another model or tokenizer is named.
    """
    run = Path(config.init_from)
    if not config.init_from or (config.resume != "none" and not run.exists()):
        return config
    if not (run / "config.toml").is_file():
        if (run / "config.json").is_file():
            todo = f"make a run of it by `zeroshard import {run} RUN`, and give that"
            raise UserError("init_from", f"{run} is a Hugging Face folder, and no run", todo)
        raise UserError("init_from", f"{run} holds no run (no config.toml)", "give a run folder, as in runs/NAME")
    theirs = load_config(run / "config.toml").model
    kept = tokenizer_folder(run)
    meta = read_meta(kept) if kept.is_dir() else None
    # A model of transformers may have more ids than its tokenizer.
    if meta is not None and not theirs.vocab_size and not is_hugging_face(theirs.name):
        theirs = theirs.model_copy(update={"vocab_size": meta.vocab_size})
    named = {name: getattr(config.model, name) for name in config.model.model_fields_set}
    model = theirs.model_copy(update=named)
    resume.check_model(theirs.model_dump(), model.model_dump(), free=("activation_checkpointing", "dropout"))
    config = config.model_copy(update={"model": model})
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


def load_initial_weights(run: Path, model: LanguageModel, strategy: Strategy, comm: Communicator) -> None:
    """Give ``strategy`` the weights of the newest good checkpoint of ``run``, and no optimizer state. Collective.

    Adapters of that run are added to its weights; those of ``model`` begin as in a new run.

    Args:
        run: its folder.
        model: the strategy's, with its names.
        strategy: is loaded.
        comm: the ranks.

    Raises:
        UserError: there is none, or it is of another model.
    """
    try:
        path = resume.choose(comm, "auto", checkpoint_folder(run))
    except UserError as error:
        raise UserError("init_from", error.what, "restore one from a copy, or begin from another run") from None
    if path is None:
        raise UserError("init_from", f"{run} has no complete checkpoint yet", "let it train up to one first")
    try:
        seen_as = partial(_as_initial, load_config(run / "config.toml").lora, model)
        checkpoint.load(path, WeightsAlone(strategy, ("param", "buffer"), seen_as), verified=True, settings=False)
    except UserError:
        raise
    except ValueError as error:
        raise UserError("init_from", f"{path}: {error}", "name the model of that run, or none") from None
    if comm.rank == 0:
        print(f"init-from: the weights of {path}", file=sys.stderr, flush=True)


def _as_initial(lora: LoraConfig, model: LanguageModel, reader: ShardReader) -> ShardReader:
    """A checkpoint with adapters as ``lora`` says, seen as one of ``model`` before its first step."""
    saved = lora_of(lora)
    if saved is not None:
        reader = MergedWeights(reader, saved.scale, transposed_weights(model))
    return reader if model.lora is None else NewAdapters(reader, initial_adapters(model))


def _is_of(meta: DataMeta, tokenizer: str) -> bool:
    """Whether ``tokenizer`` is that of a run, whose kept tokenizer ``meta`` describes."""
    if not meta.tokenizer_sha256 or not tokenizer.startswith("json:"):
        return meta.tokenizer == tokenizer and not tokenizer.startswith("bpe:")
    found = make_tokenizer(tokenizer, ())
    return isinstance(found, BpeTokenizer) and (
        hashlib.sha256(found.to_json().encode()).hexdigest() == meta.tokenizer_sha256
    )
