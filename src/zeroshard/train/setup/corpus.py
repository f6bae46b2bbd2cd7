"""Opens the data of a run: prepared tokens, rows of examples or mixed sources, or a stream tokenized on the fly."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterable, Sequence
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
from zeroshard.data.meta import SPLITS, DataMeta, read_meta
from zeroshard.data.mixing import JoinedRows, Mixture
from zeroshard.data.sources import SyntheticSize, has_columns, open_source
from zeroshard.data.spec import data_dir
from zeroshard.data.stream import StreamBatches, validation_tokens
from zeroshard.data.tables import Tables
from zeroshard.data.tokenizer import TOKENIZER_FILE, keep_tokenizer, make_tokenizer, tokenizer_identity
from zeroshard.errors import UserError, warn
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.run import Corpus
from zeroshard.train.setup.agree import agree_on
from zeroshard.train.setup.prepare_data import Source, data_folder, data_spec, prepare_data, sources_of


def open_corpus(config: TrainConfig, comm: Communicator, grad_accum_steps: int) -> Corpus:
    """Open the data that ``config`` trains on, and prepare it first if needed; collective.

    Raises:
        UserError: the data is not available, differs between ranks, or is too little.
    """
    return (_streamed if config.data.streaming else _prepared)(config, comm, grad_accum_steps)


def _prepared(config: TrainConfig, comm: Communicator, grad_accum_steps: int) -> Corpus:
    """Open prepared data: text or examples, of one source or of several that are mixed."""
    data, sources = config.data, sources_of(config.data)
    counts_all = data.format == "text" and not data.mix  # every target of every row
    folders, metas = _prepared_alike(sources, comm)
    groups = comm.world_size // config.sequence_parallel
    batch = config.micro_batch_size * grad_accum_steps * groups  # rows of all ranks in a step
    least = {"train": batch if counts_all else 1, "val": 1}
    named = list(zip(sources, folders, strict=True))
    options = {"packed": data.packing, "of_examples": data.format != "text"}

    def rows_of(source: Source, folder: Path, split: str) -> Rows:
        words = f"{source.name} {split}".strip()
        return rows_of_folder(folder, split, config.seq_len, named=words, at_least=least[split], **options)

    parts = {split: [rows_of(*each, split) for each in named] for split in SPLITS}
    train, val = (_joined(parts[split]) for split in SPLITS)
    weights = [source.weight for source in sources]
    mixture = Mixture(train, weights, config.seed) if isinstance(train, JoinedRows) else None
    if mixture is None:
        require_rows(train, batch)
    for split, of_split in parts.items():
        for said in (rows.said(split) for rows in of_split if isinstance(rows, ExampleRows)):
            if comm.rank == 0 and said:
                print(said, file=sys.stderr, flush=True)
    ranks, size = _ranks(config, comm), config.micro_batch_size
    batches = RowBatches(train, size, grad_accum_steps, seed=config.seed, rows_at=mixture, **ranks)
    chosen = Mixture(val, weights, config.seed).evenly(config.eval_rows) if isinstance(val, JoinedRows) else None
    rows_per_step = batches.num_micro_batches * size
    in_rows = f" packed {config.seq_len}" if data.packing else ""
    mixed = f" {weights}" if data.mix else ""
    tokens = " ".join(meta.tokens_sha256 for meta in metas)
    choices = f"{tokens}{in_rows}{mixed}"

    def tokens_by_source(steps: int) -> dict[str, int]:
        numbers = [] if mixture is None else mixture.tokens(steps * rows_per_step)
        return {source.name: number for source, number in zip(sources, numbers, strict=False)}

    told = _told(sources, parts["train"], mixture, config.max_steps * rows_per_step)
    return Corpus(
        batches=batches,
        eval_batches=EvalBatches(val, size, config.eval_rows, chosen=chosen, **ranks),
        vocab_size=max(meta.vocab_size for meta in metas),
        eos_id=metas[0].eos_id,
        sha256=tokens if counts_all else hashlib.sha256(choices.encode()).hexdigest(),
        keep_tokenizer=lambda kept: _copy_tokenizer(folders[0], kept, data.tokenizer),
        num_tokens=sum(meta.splits["train"].num_tokens for meta in metas),
        loss_weight=None if counts_all else batches.weight,
        named_evals=_named_evals(config, folders[0], comm),
        said=told[0],
        facts=told[1],
        tokens_by_source=tokens_by_source,
    )


def _ranks(config: TrainConfig, comm: Communicator) -> dict[str, Any]:
    """Return the arguments by which batches know their ranks."""
    shared = {"sequence_parallel": config.sequence_parallel, "tiles": config.tiles_as_ranks}
    return {"rank": comm.rank, "world_size": comm.world_size, **shared}


def _prepared_alike(sources: Sequence[Source], comm: Communicator) -> tuple[list[Path], list[DataMeta]]:
    """Prepare each source; return their folders and metadata. A UserError if their tokenizers differ. Collective."""
    folders, metas = [data_folder(source.data) for source in sources], []
    for source, folder in zip(sources, folders, strict=True):
        first_rank_does(comm, partial(prepare_data, source.data))
        metas.append(read_meta(folder))
        prefix = f"{source.name}: " if source.name else ""
        agree_on(comm, {f"{prefix}{fact}": value for fact, value in data_facts(metas[-1]).items()})
        if (metas[-1].tokenizer, metas[-1].tokenizer_sha256) != (metas[0].tokenizer, metas[0].tokenizer_sha256):
            what = f"{folder} was prepared with another tokenizer ({metas[-1].tokenizer}) than {folders[0]}"
            raise UserError("data.mix", what, "delete it, so that it is prepared anew")
    return folders, metas


def _joined(parts: Sequence[Rows]) -> Rows:
    return JoinedRows(parts) if parts[1:] else parts[0]


def _told(
    sources: Sequence[Source], parts: Sequence[Rows], mixture: Mixture | None, num_rows: int
) -> tuple[str, dict[str, Any]]:
    """Describe how rows are filled and sources mixed in ``num_rows`` rows of training: in words, and for the log."""
    facts: dict[str, Any] = {}
    words = []
    examples = [rows for rows in parts if isinstance(rows, ExampleRows)]
    if examples:
        num_inputs = sum(int(rows.num_inputs.sum()) for rows in examples)
        num_filled = sum(rows.num_rows for rows in examples)
        facts = {"rows": num_filled, "examples": sum(rows.members.size for rows in examples)}
        facts["filled"] = round(num_inputs / (num_filled * examples[0].seq_len), 4)
    if mixture is None:
        return (examples[0].in_words() if examples else ""), facts
    counts, tokens = mixture.foreseen(num_rows)
    for source, part, count, num_tokens in zip(sources, parts, counts, tokens, strict=True):
        share, epochs = num_tokens / max(sum(tokens), 1), count / part.num_rows
        facts.setdefault("mix", {})[source.name] = {"rows": count, "tokens": num_tokens, "epochs": round(epochs, 4)}
        words.append(f"{source.name} {share:.1%} of tokens, {epochs:.3g} epochs".replace("%", " %"))
    return "; ".join(words), facts


def _named_evals(config: TrainConfig, folder: Path, comm: Communicator) -> dict[str, Iterable[EvalBatch]]:
    """Return the batches of each further validation set, tokenized by the tokenizer in ``folder``. Collective."""
    meta, found = read_meta(folder), {}
    tokenizer = f"json:{folder / TOKENIZER_FILE}" if meta.tokenizer_sha256 else config.data.tokenizer
    size, most, data_column = config.micro_batch_size, config.eval_rows, config.data.column
    for name, path in config.data.val_paths.items():
        column = data_column if has_columns("text", (path,)) else "text"
        changes = {"source": "text", "path": (path,), "mix": (), "tokenizer": tokenizer, "column": column}
        data = config.data.model_copy(update={**changes, "val_fraction": 0.0, "max_tokens": 0})
        where = data_dir(data_spec(data), folder.parent)
        data = data.model_copy(update={"dir": str(where)})
        first_rank_does(comm, partial(prepare_data, data))
        own = read_meta(where)
        agree_on(comm, {f"{name}: {fact}": value for fact, value in data_facts(own).items()})
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
    kept.mkdir(exist_ok=True)
    for name in ("meta.json", TOKENIZER_FILE, *TEMPLATE_FILES):
        if (tokens_folder / name).exists():
            shutil.copyfile(tokens_folder / name, kept / name)
    is_named = tokenizer.startswith("json:") and has_template(Path(tokenizer.removeprefix("json:")).parent)
    if is_named and not has_template(kept):  # plain text is prepared without a template
        keep_template(kept, find_template("", tokenizer))
