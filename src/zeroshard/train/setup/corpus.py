"""What a run trains on, ready to be read: prepared tokens, or tables that are read as they are needed."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.comm import Communicator
from zeroshard.data import Batches, EvalBatches, TokenBatches, TokenDataset, require_enough
from zeroshard.data.base import EvalBatch
from zeroshard.data.examples.batches import ExampleBatches, ExampleEvalBatches, require_rows
from zeroshard.data.examples.row_plan import rows_in
from zeroshard.data.examples.store import require_plain
from zeroshard.data.examples.template import TEMPLATE_FILES
from zeroshard.data.lanes import open_stream
from zeroshard.data.meta import DataMeta, read_meta
from zeroshard.data.prepared import tables_fingerprint
from zeroshard.data.sources import SyntheticSize, open_source
from zeroshard.data.spec import data_dir
from zeroshard.data.stream import StreamBatches, validation_tokens
from zeroshard.data.tables import Tables
from zeroshard.data.tokenizer import TOKENIZER_FILE, keep_tokenizer, make_tokenizer, tokenizer_identity
from zeroshard.errors import UserError
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.agree import agree_on, first_rank_does, gather_bytes
from zeroshard.train.setup.prepare_data import data_folder, data_spec, prepare_data


@dataclass(frozen=True)
class Corpus:
    """One rank's part of a run's data.

    Attributes:
        batches: to train on.
        eval_batches: to evaluate on.
        vocab_size: ids are below it.
        eos_id: ends each document; None where nothing does.
        sha256: the same exactly where the same is trained on.
        keep_tokenizer: make a folder that gives the tokenizer back, without the data.
        close: lets go of what is read ahead.
        position: where the data of a step begin, as JSON holds it; None where the step says it.
        go_on: have the data of a step be those that were next when the first argument was given by ``position``.
        earlier_sha256: what an earlier version said of the same text, of which it took other rows; empty: none.
        num_tokens: to train on; 0 where they are streamed, and nobody has counted them.
        named_evals: further sets to evaluate on, by name.
        loss_weight: what the loss of (step, micro_step) is multiplied by; None: nothing.
        said: of examples, how they are laid into rows, in words; empty: nothing.
        facts: the same as numbers, for the log.
    """

    batches: Batches
    eval_batches: Iterable[EvalBatch]
    vocab_size: int
    eos_id: int | None
    sha256: str
    keep_tokenizer: Callable[[Path], None]
    close: Callable[[], None] = lambda: None
    position: Callable[[int], dict[str, Any] | None] = lambda step: None
    go_on: Callable[[Mapping[str, Any] | None, int], None] = lambda saved, step: None
    earlier_sha256: str = ""
    num_tokens: int = 0
    loss_weight: Callable[[int, int], float] | None = None
    named_evals: Mapping[str, Iterable[EvalBatch]] = field(default_factory=dict)
    said: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)


def open_corpus(config: TrainConfig, comm: Communicator, grad_accum_steps: int) -> Corpus:
    """Prepare or open what ``config`` trains on; collective.

    Raises:
        UserError: it cannot be had, is not the same on every rank, or is too little.
    """
    if config.data.format != "text" or config.data.packing:
        return _in_rows(config, comm, grad_accum_steps)
    return (_streamed if config.data.streaming else _prepared)(config, comm, grad_accum_steps)


def _prepared(config: TrainConfig, comm: Communicator, grad_accum_steps: int) -> Corpus:
    folder = data_folder(config.data)
    first_rank_does(comm, lambda: prepare_data(config.data))
    meta = read_meta(folder)
    agree_on(comm, data_facts(meta))
    require_plain(folder, meta)
    train, val = (TokenDataset.open(folder, split) for split in ("train", "val"))
    require_enough(train, config.seq_len, config.micro_batch_size * grad_accum_steps * comm.world_size)
    require_enough(val, config.seq_len, 1, split="val")
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    shapes = {"seq_len": config.seq_len, "micro_batch_size": config.micro_batch_size}
    return Corpus(
        batches=TokenBatches(train, **shapes, grad_accum_steps=grad_accum_steps, seed=config.seed, **ranks),
        eval_batches=EvalBatches(val, **shapes, max_rows=eval_rows(config), **ranks),
        vocab_size=train.vocab_size,
        eos_id=meta.eos_id,
        sha256=meta.tokens_sha256,
        keep_tokenizer=lambda kept: _copy_tokenizer(folder, kept),
        num_tokens=train.num_tokens,
        named_evals=_named_evals(config, folder, comm),
    )


def _in_rows(config: TrainConfig, comm: Communicator, grad_accum_steps: int) -> Corpus:
    """Examples, or whole documents of text that are packed."""
    folder, data = data_folder(config.data), config.data
    first_rank_does(comm, lambda: prepare_data(data))
    meta = read_meta(folder)
    agree_on(comm, data_facts(meta))
    if data.format == "text":
        require_plain(folder, meta)
    cut, packed = data.too_long == "cut", data.packing
    train, val = (rows_in(folder, split, config.seq_len, cut=cut, packed=packed) for split in ("train", "val"))
    require_rows(train, config.micro_batch_size * grad_accum_steps * comm.world_size)
    for split, rows in (("train", train), ("val", val)):
        if comm.rank == 0 and rows.said(split):
            print(rows.said(split), file=sys.stderr, flush=True)
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    size = config.micro_batch_size
    batches = ExampleBatches(train, size, grad_accum_steps, seed=config.seed, **ranks)
    facts = {"rows": train.num_rows, "examples": train.members.size, "filled": round(train.share_filled, 4)}
    in_rows = f" packed {config.seq_len}" if packed else ""
    return Corpus(
        batches=batches,
        eval_batches=ExampleEvalBatches(val, size, max_rows=eval_rows(config), **ranks),
        vocab_size=meta.vocab_size,
        eos_id=meta.eos_id,
        sha256=hashlib.sha256(f"{meta.tokens_sha256} {data.too_long}{in_rows}".encode()).hexdigest(),
        keep_tokenizer=lambda kept: _copy_tokenizer(folder, kept),
        num_tokens=meta.splits["train"].num_tokens,
        loss_weight=batches.weight,
        named_evals=_named_evals(config, folder, comm),
        said=train.in_words(),
        facts=facts,
    )


def _named_evals(config: TrainConfig, folder: Path, comm: Communicator) -> dict[str, Iterable[EvalBatch]]:
    """The batches of each further validation set; the tokenizer is that of ``folder``. Collective."""
    meta, found = read_meta(folder), {}
    tokenizer = f"json:{folder / TOKENIZER_FILE}" if meta.tokenizer_sha256 else config.data.tokenizer
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    size, most = config.micro_batch_size, eval_rows(config)
    for name, path in config.data.val_paths.items():
        changes = {"source": "text", "path": (path,), "tokenizer": tokenizer, "val_fraction": 0.0, "max_tokens": 0}
        data = config.data.model_copy(update=changes)
        where = data_dir(data_spec(data), folder.parent)
        data = data.model_copy(update={"dir": str(where)})
        first_rank_does(comm, partial(prepare_data, data))
        own = read_meta(where)
        agree_on(comm, {f"{name}: {fact}": value for fact, value in data_facts(own).items()})
        if own.examples or data.packing:
            cut = data.too_long == "cut"
            rows = rows_in(where, "train", config.seq_len, named=name, cut=cut, packed=data.packing)
            found[name] = ExampleEvalBatches(rows, size, most, **ranks)
        else:
            tokens = TokenDataset.open(where, "train")
            require_enough(tokens, config.seq_len, 1, split=name)
            found[name] = EvalBatches(tokens, config.seq_len, size, most, **ranks)
    return found


def _streamed(config: TrainConfig, comm: Communicator, grad_accum_steps: int) -> Corpus:
    data = config.data
    if data.max_tokens:
        raise UserError("data.max_tokens", f"{data.max_tokens:,} cannot bound a stream", "set max_steps instead")
    if data.tokenizer.startswith("bpe:"):
        todo = "train one by `zeroshard prepare` on a part of it, and give its tokenizer.json as json:PATH"
        raise UserError("data.tokenizer", f"{data.tokenizer} would have to be trained before the first step", todo)
    tables = open_source(data.source, data.path, SyntheticSize(256, 1, 0), column=data.column)
    if not isinstance(tables, Tables):
        todo = "leave it out, or name .parquet or .jsonl files, or a data set of the hub"
        raise UserError("data.streaming", f"the source {data.source} is no table of texts", todo)
    tokenizer = make_tokenizer(data.tokenizer, ())
    text = open_stream(tables, tokenizer, tokenizer_identity(data.tokenizer), data.val_fraction)
    agree_on(comm, {"data": text.identity})
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    gather = partial(gather_bytes, comm)
    num_rows = eval_rows(config)
    val = validation_tokens(text, num_rows * config.seq_len + 1, **ranks, gather=gather)
    require_enough(val, config.seq_len, 1, split="val")
    shapes = {"seq_len": config.seq_len, "micro_batch_size": config.micro_batch_size}
    order = {"grad_accum_steps": grad_accum_steps, "seed": config.seed}
    batches = StreamBatches(text, **shapes, **order, **ranks, gather=gather)
    rules = {"source": data.source, "val_fraction": data.val_fraction, "split": text.holdout.rule}
    corpus_sha256 = tables_fingerprint(tables).sha256

    def keep(kept: Path) -> None:
        shutil.rmtree(kept, ignore_errors=True)
        keep_tokenizer(kept, tokenizer, tokenizer.vocab_size, f"streamed from {data.source}", rules, corpus_sha256)

    return Corpus(
        batches=batches,
        eval_batches=EvalBatches(val, **shapes, max_rows=num_rows, **ranks),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        sha256=text.identity,
        keep_tokenizer=keep,
        close=batches.close,
        position=batches.position,
        go_on=batches.go_on,
        earlier_sha256=text.earlier_identity,
    )


def eval_rows(config: TrainConfig) -> int:
    """Sequences in an evaluation."""
    return config.eval_rows or config.eval_batches * config.micro_batch_size


def data_facts(meta: DataMeta) -> dict[str, object]:
    """What must be the same where every rank reads its own copy of the data."""
    files = {f"data {shard.file}": shard.sha256 for split in meta.splits.values() for shard in split.shards}
    for name, examples in meta.examples.items():
        files |= {f"data {name}/counts.bin": examples.counts_sha256, f"data {name}/ends.bin": examples.ends_sha256}
    return {"data vocab_size": meta.vocab_size, **files}


def _copy_tokenizer(tokens_folder: Path, kept: Path) -> None:
    kept.mkdir(exist_ok=True)
    for name in ("meta.json", "tokenizer.json", *TEMPLATE_FILES):
        if (tokens_folder / name).exists():
            shutil.copyfile(tokens_folder / name, kept / name)
