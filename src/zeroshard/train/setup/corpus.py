"""Opens the data of a run: prepared tokens, rows of examples, or a stream tokenized on the fly."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.comm import Communicator
from zeroshard.comm.agree import first_rank_does, gather_bytes
from zeroshard.data import EvalBatches, RowBatches, TextRows, require_enough
from zeroshard.data.base import EvalBatch, Rows
from zeroshard.data.batches import require_rows
from zeroshard.data.chat_templates import TEMPLATE_FILES, find_template, has_template, keep_template
from zeroshard.data.examples.row_plan import ExampleRows, rows_of_folder
from zeroshard.data.lanes import open_stream
from zeroshard.data.meta import DataMeta, read_meta, write_meta
from zeroshard.data.sources import SyntheticSize, has_columns, open_source
from zeroshard.data.spec import data_dir
from zeroshard.data.stream import StreamBatches, validation_tokens
from zeroshard.data.tables import Tables
from zeroshard.data.tokenizer import TOKENIZER_FILE, keep_tokenizer, make_tokenizer, tokenizer_identity
from zeroshard.data.tokens import check_texts
from zeroshard.host.errors import UserError, warn
from zeroshard.host.regular_files import copy_inside, folder_inside
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.run import Corpus
from zeroshard.train.setup.agree import agree_on
from zeroshard.train.setup.prepare_data import data_folder, data_spec, prepare_data


def open_corpus(config: TrainConfig, comm: Communicator, grad_accum_steps: int) -> Corpus:
    """Open the data that ``config`` trains on, and prepare it first if needed; collective.

    Raises:
        UserError: the data is not available, differs between ranks, or is too little.
    """
    return (_streamed if config.data.streaming else _prepared)(config, comm, grad_accum_steps)


def vocab_size_of(config: TrainConfig, comm: Communicator) -> int:
    """Return the number of ids of the run's tokens, and prepare its data first if needed; collective."""
    if config.data.streaming:
        return make_tokenizer(config.data.tokenizer, ()).vocab_size
    first_rank_does(comm, partial(prepare_data, config.data))
    return read_meta(data_folder(config.data)).vocab_size


def _prepared(config: TrainConfig, comm: Communicator, grad_accum_steps: int) -> Corpus:
    """Open prepared data: text or examples."""
    data = config.data
    counts_all = data.format == "text"  # every target of every row
    folder = data_folder(data)
    first_rank_does(comm, partial(prepare_data, data))
    meta = read_meta(folder)
    agree_on(comm, data_facts(meta))
    check_texts(folder, meta)
    groups = config.num_groups(comm.world_size)
    batch = config.micro_batch_size * grad_accum_steps * groups  # rows of all ranks in a step
    least = {"train": batch if counts_all else 1, "val": 1}

    def rows_of(split: str) -> Rows:
        packed, of_examples = data.packing, not counts_all
        seq_len, at_least = config.seq_len, least[split]
        return rows_of_folder(folder, split, seq_len, packed=packed, of_examples=of_examples, at_least=at_least)

    train, val = rows_of("train"), rows_of("val")
    require_rows(train, batch)
    for split, rows in (("train", train), ("val", val)):
        if comm.rank == 0 and isinstance(rows, ExampleRows) and (said := rows.said(split)):
            print(said, file=sys.stderr, flush=True)
    ranks, size = _ranks(config, comm), config.micro_batch_size
    batches = RowBatches(train, size, grad_accum_steps, seed=config.seed, **ranks)
    choices = f"{meta.tokens_sha256}{f' packed {config.seq_len}' if data.packing else ''}"
    facts: dict[str, Any] = {}
    if isinstance(train, ExampleRows):
        facts = {"rows": train.num_rows, "examples": train.members.size, "filled": round(train.share_filled, 4)}
    return Corpus(
        batches=batches,
        eval_batches=EvalBatches(val, size, config.eval_rows, **ranks),
        vocab_size=meta.vocab_size,
        eos_id=meta.eos_id,
        sha256=meta.tokens_sha256 if counts_all else hashlib.sha256(choices.encode()).hexdigest(),
        keep_tokenizer=lambda kept: _copy_tokenizer(folder, kept, data.tokenizer),
        num_tokens=meta.splits["train"].num_tokens,
        loss_weight=None if counts_all else batches.weight,
        named_evals=_named_evals(config, folder, comm),
        said=train.in_words() if isinstance(train, ExampleRows) else "",
        facts=facts,
    )


def _ranks(config: TrainConfig, comm: Communicator) -> dict[str, Any]:
    """Return the arguments by which batches know their ranks."""
    return {"rank": comm.rank, "world_size": comm.world_size, "sequence_parallel": config.sequence_parallel}


def _named_evals(config: TrainConfig, folder: Path, comm: Communicator) -> dict[str, Iterable[EvalBatch]]:
    """Return the batches of each further validation set, tokenized by the tokenizer in ``folder``. Collective."""
    meta, found = read_meta(folder), {}
    tokenizer = f"json:{folder / TOKENIZER_FILE}" if meta.tokenizer_sha256 else config.data.tokenizer
    size, most, data_column = config.micro_batch_size, config.eval_rows, config.data.column
    for name, path in config.data.val_paths.items():
        column = data_column if has_columns("text", (path,)) else "text"
        changes = {"source": "text", "path": (path,), "tokenizer": tokenizer, "column": column}
        data = config.data.model_copy(update={**changes, "val_fraction": 0.0, "max_tokens": 0})
        where = data_dir(data_spec(data), folder.parent)
        data = data.model_copy(update={"dir": str(where)})
        first_rank_does(comm, partial(prepare_data, data))
        facts = data_facts(read_meta(where))
        agree_on(comm, {f"{name}: {fact}": value for fact, value in facts.items()})
        rows = rows_of_folder(where, "train", config.seq_len, named=name, packed=data.packing)
        found[name] = EvalBatches(rows, size, most, **_ranks(config, comm))
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
    for line in tables.left_out if comm.rank == 0 else ():
        warn(line)
    tokenizer = make_tokenizer(data.tokenizer, ())
    text = open_stream(tables, tokenizer, tokenizer_identity(data.tokenizer), data.val_fraction)
    agree_on(comm, {"data": text.identity})
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    gather = partial(gather_bytes, comm)
    num_rows = config.eval_rows
    val = validation_tokens(text, num_rows * config.seq_len + 1, **ranks, gather=gather)
    require_enough(val, config.seq_len, 1, split="val")
    shapes = {"seq_len": config.seq_len, "micro_batch_size": config.micro_batch_size}
    order = {"grad_accum_steps": grad_accum_steps, "seed": config.seed}
    batches = StreamBatches(text, **shapes, **order, **_ranks(config, comm), gather=gather)
    rules = {"source": data.source, "val_fraction": data.val_fraction, "split": text.holdout.rule}
    corpus_sha256 = tables.fingerprint().sha256

    def keep(kept: Path) -> None:
        shutil.rmtree(kept, ignore_errors=True)
        keep_tokenizer(kept, tokenizer, tokenizer.vocab_size, f"streamed from {data.source}", rules, corpus_sha256)

    return Corpus(
        batches=batches,
        eval_batches=EvalBatches(
            TextRows(val, config.seq_len), config.micro_batch_size, num_rows, **_ranks(config, comm)
        ),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        sha256=text.identity,
        keep_tokenizer=keep,
        close=batches.close,
        position=batches.position,
        restore_position=batches.restore_position,
    )


def data_facts(meta: DataMeta) -> dict[str, object]:
    """Facts about prepared data that must be equal on all ranks, because each may read its own copy."""
    files = {f"data {shard.file}": shard.sha256 for split in meta.splits.values() for shard in split.shards}
    for name, examples in meta.examples.items():
        files |= {f"data {name}/counts.bin": examples.counts_sha256, f"data {name}/ends.bin": examples.ends_sha256}
    return {"data vocab_size": meta.vocab_size, **files}


def _copy_tokenizer(tokens_folder: Path, kept: Path, tokenizer: str) -> None:
    """Copy the tokenizer of prepared tokens into the run's folder ``kept``, and the chat template if it has one."""
    folder_inside(kept.parent, kept.name)
    for name in (TOKENIZER_FILE, *TEMPLATE_FILES):
        if (tokens_folder / name).exists():
            copy_inside(tokens_folder / name, kept)
    is_named = tokenizer.startswith("json:") and has_template(Path(tokenizer.removeprefix("json:")).parent)
    if is_named and not has_template(kept):  # plain text is prepared without a template
        keep_template(kept, find_template("", tokenizer))
    write_meta(kept, read_meta(tokens_folder))
