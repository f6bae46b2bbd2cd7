"""``zeroshard eval``: how well the model of a run, or of a Hugging Face folder, predicts prepared text.

loss            mean negative log-likelihood of a token, nats
perplexity      exp(loss)
bits_per_byte   loss * tokens / (ln 2 * bytes of text): independent of the tokenizer, so it compares models with
                different tokenizers (Gao et al., "The Pile", 2020, https://arxiv.org/abs/2101.00027, section 3.1)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from math import exp, inf, log
from pathlib import Path

import numpy as np
import torch

from zeroshard import checkpoint
from zeroshard.checkpoint.read_as import WeightsAlone
from zeroshard.comm import Communicator, LocalCommunicator
from zeroshard.comm.agree import first_rank_does
from zeroshard.data import EvalBatches, Tokenizer, load_tokenizer, read_meta
from zeroshard.data.base import EvalBatch
from zeroshard.data.examples.row_plan import rows_of_folder
from zeroshard.data.joining import num_text_bytes
from zeroshard.data.sources import has_columns
from zeroshard.data.tokenizer import TOKENIZER_FILE
from zeroshard.host.errors import ExitStatus, UserError, warn
from zeroshard.host.launch.environment import World, world_from_env
from zeroshard.models import LanguageModel, SequenceParallel
from zeroshard.models.hugging_face.folder import is_hugging_face, source_of, tokenizer_file
from zeroshard.parallel import strategy_entry
from zeroshard.settings import rules
from zeroshard.settings.validate import validate
from zeroshard.train.config.command_settings import EvalConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.data_section import UNNAMED, DataConfig
from zeroshard.train.config.named_code import require_trust
from zeroshard.train.config.toml import load_config
from zeroshard.train.inference.generate import checkpoint_of, load_for_text, load_weights, name_of, nothing_in
from zeroshard.train.loop.validation_loss import evaluate
from zeroshard.train.records.log_files import finite_or_null
from zeroshard.train.setup.assemble import separating_id, sharded
from zeroshard.train.setup.hugging_face import with_kept_tokenizer
from zeroshard.train.setup.init_from import whole
from zeroshard.train.setup.numerics import choose_device
from zeroshard.train.setup.prepare_data import data_folder, prepare_data
from zeroshard.train.setup.ranks import join
from zeroshard.train.setup.run_folder import kept_meta, tokenizer_folder

MOST_EXPONENT = 709.0  # the exponential of a larger number overflows a double


@dataclass(frozen=True)
class Scores:
    """The results of an evaluation."""

    loss: float  # mean loss in nats per token
    perplexity: float  # exponential of the loss; infinite if it overflows
    bits_per_byte: float | None  # bits per byte of text; None if there is no tokenizer, and for fine-tuning examples
    num_tokens: int  # number of predicted tokens; of fine-tuning examples only those that count in the loss
    num_bytes: int  # bytes of text of these tokens; 0 if ``bits_per_byte`` is None
    step: int | None  # step of the checkpoint; None for a Hugging Face folder


def run_eval(config: EvalConfig) -> int:
    """Evaluate, and print the scores on rank 0; returns the exit status. Every rank calls it.

    Raises:
        UserError: there is no run, no checkpoint, no data, or they do not fit together.
    """
    world = world_from_env() or World()
    device = choose_device("auto", world.local_rank)
    with ExitStack() as stack:
        strategy = config.strategy if config.strategy != "none" else "zero0"
        comm = join(world, "auto", strategy, device, stack).comm
        scores = score(config, comm, device)
        if comm.rank == 0:
            print(json.dumps(finite_or_null(asdict(scores))) if config.json_line else in_words(scores))
    return int(ExitStatus.OK)


def score(config: EvalConfig, comm: Communicator, device: torch.device) -> Scores:
    """The scores of one split; the same on every rank. Collective."""
    folder = Path(config.run)
    trained = load_config(folder / "config.toml") if (folder / "config.toml").is_file() else None
    if trained is None and not is_hugging_face(name_of(config.run)):
        raise nothing_in(folder)
    if trained is not None:
        require_trust(trained.model, folder / "config.toml", trusted=config.model.trust_remote_code)
        trained = with_kept_tokenizer(trained, folder)
    tokens_folder, split = _tokens_folder(config, trained), config.split
    if config.data:
        tokens_folder, split = _prepared(config, trained, comm), "train"
    meta = read_meta(tokens_folder)
    model, step, seq_len = _model(config, trained, comm, device)
    tokenizer = None if meta.tokenizer == "none" else _tokenizer(tokens_folder, comm)
    _require_same_tokenizer(folder, tokens_folder, meta.vocab_size, model)
    if split == "val" and comm.rank == 0:
        _warn_of_overlap(folder, tokens_folder)
    seq_len = config.seq_len or seq_len
    model.check_seq_len(seq_len)
    if config.sequence_parallel > 1:
        rules.check_cut(seq_len, config.sequence_parallel)
        model.share_sequences(SequenceParallel.of(comm, config.sequence_parallel, longest=seq_len))
    most_rows = config.rows or config.batches * config.micro_batch_size
    packed = trained is not None and trained.data.packing
    rows = rows_of_folder(tokens_folder, split, seq_len, packed=packed)
    sizes = config.micro_batch_size, most_rows or rows.num_rows
    share = config.sequence_parallel
    batches = EvalBatches(rows, *sizes, comm.rank, comm.world_size, sequence_parallel=share)
    num_tokens = batches.num_targets
    num_bytes = 0
    if tokenizer is not None and not meta.examples:
        everything = EvalBatches(rows, batches.micro_batch_size, batches.num_rows, rank=0, world_size=1)  # of all ranks
        num_bytes = sum(
            num_text_bytes(tokenizer, np.asarray(targets_T), np.asarray(tokens_T[:1]))
            for tokens_BT, targets_BT, _ in everything
            for tokens_T, targets_T in zip(tokens_BT, targets_BT, strict=True)
        )
    loss = evaluate(model, _known_ids(batches, model.config.vocab_size, tokens_folder), comm, device)
    bits = loss * num_tokens / (log(2) * num_bytes) if num_bytes else None
    perplexity = exp(loss) if loss < MOST_EXPONENT else inf
    return Scores(loss, perplexity, bits, num_tokens, num_bytes, step)


def in_words(scores: Scores) -> str:
    """Format scores: ``loss 2.0461  perplexity 7.74  bits_per_byte 2.9519  tokens 12,345  bytes 12,345``."""
    words = [f"loss {scores.loss:.4f}", f"perplexity {scores.perplexity:.4g}"]
    if scores.bits_per_byte is not None:
        words.append(f"bits_per_byte {scores.bits_per_byte:.4f}")
    words.append(f"tokens {scores.num_tokens:,}")
    if scores.num_bytes:
        words.append(f"bytes {scores.num_bytes:,}")
    if scores.step is not None:
        words.append(f"step {scores.step:,}")
    return "  ".join(words)


def _model(
    config: EvalConfig, trained: TrainConfig | None, comm: Communicator, device: torch.device
) -> tuple[LanguageModel, int | None, int]:
    """The model with its weights, the step of the checkpoint (or None), and the sequence length to evaluate with."""
    folder, trusted = Path(config.run), config.model.trust_remote_code
    if trained is None and config.strategy != "none":
        _last_weights_alone(config)
        named = {"name": name_of(config.run), "trust_remote_code": trusted}
        settings = {"model": named, "strategy": config.strategy, "dtype": config.dtype}
        model, _ = sharded(TrainConfig.model_validate(settings), 1, None, comm, device)
        return model, None, min(model.config.seq_len, 1024)
    if trained is None:
        model, _ = load_for_text(folder, config.weights, config.dtype, trusted)
        return model, None, min(model.config.seq_len, 1024)
    path = checkpoint_of(folder, config.weights)
    meta = kept_meta(folder, trained.data)
    vocab_size = meta.vocab_size if meta else trained.model.vocab_size
    step = checkpoint.read_manifest(path).step
    eos_id = separating_id(trained, meta.eos_id) if meta else None
    if config.strategy == "none":
        model = load_weights(trained, vocab_size, path, config.weights, config.dtype)
        model.eos_id = eos_id
        return model, step, trained.seq_len
    _last_weights_alone(config)
    changes = {"strategy": config.strategy, "kernels": "auto", "compile": "off", "ema_decay": 0.0}
    # sequences are shared here, as those of models of each strategy are
    changes |= {"dtype": config.dtype, "sequence_parallel": 1, "reproducible": 0, "matmul": "dtype"}
    model, strategy = sharded(trained.model_copy(update=changes), vocab_size, eos_id, comm, device, draw=False)
    encodes = strategy_entry(config.strategy).planned  # with the run's format; other strategies are given its values
    seen_whole = whole(trained, model, rounded=not encodes)
    checkpoint.load(path, WeightsAlone(strategy, seen_as=seen_whole), settings=False)
    return model, step, trained.seq_len


def _last_weights_alone(config: EvalConfig) -> None:
    if config.weights == "ema":
        raise UserError("weights", f"{config.strategy} evaluates the last weights", "use --strategy none")


def _tokens_folder(config: EvalConfig, trained: TrainConfig | None) -> Path:
    if config.data_dir or config.data:
        return Path(config.data_dir)
    if trained is None:
        raise UserError(
            "data_dir", "a Hugging Face folder says nothing of data", "name a text by --data, or a prepared folder"
        )
    if trained.data.streaming:
        raise UserError("data_dir", "the run was streamed, and has no prepared folder", "name one")
    if trained.data.source == UNNAMED:
        raise UserError("data_dir", "the run was imported, and its data were not named yet", "name a prepared folder")
    return data_folder(trained.data)


def _prepared(config: EvalConfig, trained: TrainConfig | None, comm: Communicator) -> Path:
    """Prepare all of the text ``config.data`` with the model's tokenizer, and return the folder. Collective."""
    if trained is None:
        file, tokenizer = tokenizer_file(source_of(name_of(config.run))), ""
    else:
        kept = kept_meta(Path(config.run), trained.data)
        file = tokenizer_folder(Path(config.run)) / TOKENIZER_FILE if kept and kept.tokenizer_sha256 else None
        tokenizer = "none" if kept is None else kept.tokenizer
    if file is None and tokenizer in ("", "none"):
        todo = "prepare the text, and name its folder by --data-dir"
        raise UserError("data", f"{config.run} has no tokenizer for it", todo)
    named = validate(DataConfig, {"source": config.data})
    how = named if trained is None else trained.data
    column = how.column if has_columns(named.source, named.path) else "text"
    changes = {"source": named.source, "path": named.path, "column": column, "val_fraction": 0.0, "max_tokens": 0}
    changes |= {"tokenizer": f"json:{file}" if file else tokenizer, "val_path": (), "dir": "", "streaming": False}
    data = how.model_copy(update=changes)
    first_rank_does(comm, partial(prepare_data, data))
    return data_folder(data)


def _tokenizer(folder: Path, comm: Communicator) -> Tokenizer | None:
    """The tokenizer of the prepared folder; None, with a warning, if its tables cannot be fetched here."""
    try:
        return load_tokenizer(folder)
    except UserError as error:
        if error.field != "data.tokenizer":
            raise
        if comm.rank == 0:
            warn(f"bits_per_byte is left out: {error.what}")
        return None


def _require_same_tokenizer(folder: Path, tokens_folder: Path, vocab_size: int, model: LanguageModel) -> None:
    """Raise UserError if the text was prepared with another tokenizer: its ids would give a meaningless score."""
    kept = tokenizer_folder(folder)
    todo = "prepare the text with the model's tokenizer"
    if kept.is_dir():
        ours, theirs = read_meta(kept), read_meta(tokens_folder)
        is_file = ours.tokenizer_sha256 or theirs.tokenizer_sha256
        same = ours.tokenizer_sha256 == theirs.tokenizer_sha256 if is_file else ours.tokenizer == theirs.tokenizer
        if ours.tokenizer_sha256:
            todo = f"prepare it with --data.tokenizer json:{kept}/tokenizer.json"
        elif not is_file:
            todo = f"prepare it with --data.tokenizer {ours.tokenizer}"
        if not same:
            what = f"{tokens_folder} was prepared with another tokenizer ({theirs.tokenizer}) than {folder}"
            raise UserError("data_dir", f"{what} ({ours.tokenizer})", todo)
    if vocab_size > model.config.vocab_size:
        raise UserError(
            "data_dir", f"{tokens_folder} has {vocab_size:,} ids, the model {model.config.vocab_size:,}", todo
        )


def _warn_of_overlap(folder: Path, tokens_folder: Path) -> None:
    """Print a warning if the run may have trained on the validation split of ``tokens_folder``.

    This can happen if both come from the same text, or the run was streamed, and they hold out different parts of it.
    """
    kept = tokenizer_folder(folder)
    if not kept.is_dir():
        return
    ours, theirs = read_meta(kept), read_meta(tokens_folder)
    streamed = not ours.splits["train"].num_tokens and ours.source.description.startswith("streamed from")
    same_text = ours.source.sha256 == theirs.source.sha256
    if ours.tokens_sha256 == theirs.tokens_sha256 or not (streamed or same_text):
        return
    rule, why = ours.spec.get("split", ""), ""
    if not rule or rule != theirs.spec.get("split", ""):
        why = "the run held out other text"
    elif ours.spec.get("val_fraction", 0.0) < theirs.spec.get("val_fraction", 0.0):
        shares = ours.spec.get("val_fraction"), theirs.spec.get("val_fraction")
        why = f"the run held out {shares[0]} of its text, and this folder holds out {shares[1]}"
    if why:
        warn(f"{tokens_folder} may hold for validation what the run was trained on: {why}")


def _known_ids(batches: Iterable[EvalBatch], vocab_size: int, folder: Path) -> Iterator[EvalBatch]:
    """Yield the batches; raises UserError at the first with an id outside the model's vocabulary (a damaged file)."""
    for batch in batches:
        largest = max(int(tokens_BT.max()) for tokens_BT in batch[:2])
        if largest >= vocab_size:
            what = f"{folder} holds token {largest:,} where the model has {vocab_size:,} ids: a file in it is damaged"
            raise UserError("data_dir", what, "delete the folder and prepare it again")
        yield batch


def local_score(config: EvalConfig) -> Scores:
    """The scores, computed by this process alone."""
    return score(config, LocalCommunicator(), choose_device("auto", 0))
