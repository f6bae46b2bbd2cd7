"""Prepare tokens once: read a source, split it, encode it, and publish the folder complete or not at all.

    source -> tasks -> workers -> WORK/draft/train/tokens-00000.bin ... -> renamed to the folder

Text is encoded by several processes (`encode`). A preparation of tables that was interrupted is resumed (`State`). If
several processes prepare the same folder at once, one works, and the others wait and use its result (`work_folder`). An
existing folder is reused if it was made with the same choices from the same content, by sha256; otherwise the
difference is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from zeroshard.data.bins import TokenBins
from zeroshard.data.encode import Encoder, Task, tasks_of, train_texts
from zeroshard.data.examples.prepare import write_examples
from zeroshard.data.files import Fingerprint, is_address
from zeroshard.data.meta import (
    DTYPES,
    META_NAME,
    SPLITS,
    DataMeta,
    SourceMeta,
    SplitMeta,
    dtype_for,
    read_meta,
    write_meta,
)
from zeroshard.data.pool import in_order
from zeroshard.data.registry import is_hub_name
from zeroshard.data.sources import Source, SyntheticSize, SyntheticTokens, TextFiles, TextSource, open_source
from zeroshard.data.spec import DataSpec
from zeroshard.data.split import MANY_DOCUMENTS, Holdout
from zeroshard.data.tables import PART_BYTES, Tables, count_documents
from zeroshard.data.token_shard import BLOCK_BYTES
from zeroshard.data.tokenizer import (
    TOKENIZER_FILE,
    BpeTokenizer,
    Tokenizer,
    eos_id_of,
    known_vocab_size,
    make_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from zeroshard.data.tokens import DEFAULT_SHARD_TOKENS, TokenWriter
from zeroshard.data.work_folder import (
    State,
    is_prepared,
    publish,
    read_state,
    remove,
    save_state,
    without_rules,
    work_folder,
)
from zeroshard.host.errors import UserError, warn
from zeroshard.host.process import num_cpus
from zeroshard.host.regular_files import write_inside

TRAINING_BYTES = 256 << 20  # text on which a tokenizer is trained; a character counts as a byte
SAVE_BYTES, SAVE_S = 256 << 20, 10.0  # the state is saved after so many written bytes or seconds


@dataclass(frozen=True)
class Progress:
    """The progress of a preparation."""

    num_tokens: int  # tokens of both splits that are written
    fraction: float  # share of the work that is done, in [0, 1]
    tokens_per_s: float  # rate since this process began

    @property
    def left_s(self) -> float:
        """Estimated seconds until the end; 0 if no estimate is possible."""
        rate = self.num_tokens / self.fraction if self.fraction else 0.0
        return rate * (1 - self.fraction) / self.tokens_per_s if self.tokens_per_s else 0.0


@dataclass(frozen=True)
class _Job:
    """What `prepare` hands to the function that writes a kind of source."""

    spec: DataSpec
    fingerprint: Fingerprint
    work: Path
    shard_tokens: int
    num_workers: int
    on_progress: Callable[[Progress], None]

    @property
    def draft(self) -> Path:
        return self.work / "draft"

    def writers(self, dtype: str, stack: ExitStack, state: State | None = None) -> dict[str, TokenWriter]:
        """Return a writer per split, which ``stack`` closes; each keeps the tokens that ``state`` counts."""
        most, have = self.spec.max_tokens, asdict(state or State())
        num_val = int(most * self.spec.val_fraction)
        limits = {"train": most - num_val, "val": num_val} if most else {"train": None, "val": None}
        return {
            split: stack.enter_context(
                closing(TokenWriter(self.draft, split, dtype, self.shard_tokens, limits[split], num_tokens=have[split]))
            )
            for split in SPLITS
        }


def prepare(
    spec: DataSpec,
    out: Path,
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    num_workers: int = 0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Write the tokens of ``spec`` into the folder ``out``, unless they exist already.

    Args:
        spec: what to prepare.
        out: the folder; it is made, with its parents.
        shard_tokens: tokens per file.
        num_workers: processes that encode; 0 for one per core, fewer if there is little to encode. The files do not
            depend on it.
        on_progress: called now and then with the progress.

    Returns:
        ``out``.

    Raises:
        UserError: the source cannot be read, a split would be empty, ``out`` has other content (the message says what
            differs) or cannot be written.
        OSError: the disk failed or is full; nothing is left behind except work that can be resumed.
    """
    out = Path(out)
    is_there = is_hub_name(spec.source) and (out / META_NAME).exists()
    if is_there and without_rules(read_meta(out).spec) == spec.identity():
        return out  # without asking the hub: a commit was read, and a commit does not change
    source = _open(spec)
    for line in source.left_out if isinstance(source, TextFiles | Tables) else ():
        warn(line)
    if spec.format != "text" and not isinstance(source, Tables):
        what = f"{spec.format} reads rows, and the source {', '.join(spec.paths[:3]) or spec.source} has none"
        todo = "name .jsonl or .parquet files by --data text --data.path, or a data set of the hub"
        raise UserError("data.format", what, todo)
    fingerprint = source.fingerprint()
    if is_prepared(spec.identity(), fingerprint, out):
        return out
    is_local = not isinstance(source, Tables) or not any(is_address(file.path) for file in source.files)
    plan = spec.identity() | {"shard_tokens": shard_tokens, "content": fingerprint.sha256}
    with work_folder(out, plan, is_local=is_local) as work:
        if is_prepared(spec.identity(), fingerprint, out):  # by the process that had the lock before us
            remove(work)
            return out
        workers = num_workers or min(num_cpus(), max(1, fingerprint.num_bytes // PART_BYTES))  # one costs a second
        meta = _write(source, _Job(spec, fingerprint, work, shard_tokens, workers, on_progress))
        if _open(spec).fingerprint() != fingerprint:
            remove(work)
            raise UserError("data.path", f"{meta.source.description} changed while it was read", "try again")
        write_meta(work / "draft", meta)
        publish(work, out)
    return out


def _open(spec: DataSpec) -> Source:
    size = SyntheticSize(spec.vocab_size, spec.num_tokens, spec.seed)
    vocab_size = None
    if spec.source == "bin" and spec.tokenizer != "none":
        vocab_size = known_vocab_size(spec.tokenizer)
    return open_source(spec.source, spec.paths, size, column=spec.column, vocab_size=vocab_size)


@dataclass(frozen=True)
class _Written:
    """What lies in the draft, for its ``meta.json``."""

    splits: dict[str, SplitMeta]
    rule: str
    tokenizer: Tokenizer | None
    tokenizer_name: str
    vocab_size: int
    num_documents: int


def _write(source: Source, job: _Job) -> DataMeta:
    """Write the draft's files, without its ``meta.json``, and return the content of that."""
    spec, fingerprint = job.spec, job.fingerprint
    if spec.format != "text":
        assert isinstance(source, Tables)
        return write_examples(spec, source, job.draft, job.shard_tokens)
    is_ids = isinstance(source, SyntheticTokens | TokenBins)
    written = _write_ids(source, job) if is_ids else _write_text(source, job)
    if not written.splits["train"].num_tokens:
        raise UserError("data", "no tokens are left to train on", "use more text or a smaller data.val_fraction")
    if spec.val_fraction and not written.splits["val"].num_tokens:
        what = f"{spec.val_fraction:g} of this source is less than one token"
        raise UserError("data.val_fraction", what, "use more text, a larger fraction, or 0 for no validation")
    name, tokenizer = written.tokenizer_name, written.tokenizer
    description = ", ".join(spec.paths)
    if not isinstance(source, Tables):
        description = source.description
    elif not description:
        more = f" and {len(source.files) - 1} more" if source.files[1:] else ""
        description = f"{spec.source}: {source.files[0].path}{more}"
    return DataMeta(
        spec.identity() | ({"split": written.rule} if written.rule else {}),
        SourceMeta(description, fingerprint.num_bytes, written.num_documents, fingerprint.sha256),
        name,
        write_tokenizer(job.draft, tokenizer) if isinstance(tokenizer, BpeTokenizer) else "",
        written.vocab_size,
        dtype_for(written.vocab_size),
        written.splits,
        eos_id=eos_id_of(name) if tokenizer is None else tokenizer.eos_id,
        block_bytes=BLOCK_BYTES,
    )


def _write_text(source: TextSource | Tables, job: _Job) -> _Written:
    """Encode text; of tables, resume from the state that an earlier process saved."""
    spec, is_table = job.spec, isinstance(source, Tables)
    many = count_documents(source, MANY_DOCUMENTS) if isinstance(source, Tables) else job.fingerprint.num_documents
    holdout = Holdout(spec.val_fraction, many)
    tokenizer = tokenizer_of(spec.tokenizer, train_texts(source, holdout), job.work)
    dtype = dtype_for(tokenizer.vocab_size)
    state = read_state(job.work) if is_table else State()
    began, began_with = time.monotonic(), state.train + state.val
    saved_at, saved_with = began, began_with
    with ExitStack() as stack:
        writers = job.writers(dtype, stack, state)
        tasks: Iterable[Task]
        if isinstance(source, Tables):
            is_full = all(each.is_full for each in writers.values())
            tasks = islice(source.parts() if not is_full else (), state.next_part, None)
        else:
            tasks = tasks_of(source, holdout, tokenizer, writers)
        encoder = (job.work, spec.tokenizer, dtype, holdout, spec.column)
        num_workers = job.num_workers if is_table or spec.tokenizer != "bytes" else 1  # which is no work
        if num_workers == 1:
            results = map(stack.enter_context(closing(Encoder(*encoder))), tasks)
        else:
            results = stack.enter_context(closing(in_order(Encoder, encoder, tasks, num_workers)))
        for found in results:
            for split in SPLITS:
                writers[split].write(found.ids[split])
            state.train, state.val = writers["train"].num_tokens, writers["val"].num_tokens
            state.next_part += 1
            state.num_documents += found.num_documents
            state.num_bytes = found.num_bytes if is_table else state.num_bytes + found.num_bytes
            num_tokens, now = state.train + state.val, time.monotonic()
            shares = state.num_bytes / job.fingerprint.num_bytes, num_tokens / (spec.max_tokens or 1 << 63)
            tokens_per_s = (num_tokens - began_with) / max(now - began, 1e-9)
            job.on_progress(Progress(num_tokens, min(max(shares), 1.0), tokens_per_s))
            if (num_tokens - saved_with) * DTYPES[dtype].itemsize > SAVE_BYTES or now - saved_at > SAVE_S:
                _save(job.work, state, writers)
                saved_at, saved_with = now, num_tokens
            if all(each.is_full for each in writers.values()):
                break
        _save(job.work, state, writers)
        splits = {split: writer.finish() for split, writer in writers.items()}
    num_documents = state.num_documents if is_table else job.fingerprint.num_documents
    return _Written(splits, holdout.rule, tokenizer, tokenizer.name, tokenizer.vocab_size, num_documents)


def _save(work: Path, state: State, writers: dict[str, TokenWriter]) -> None:
    for each in writers.values():
        each.sync()
    save_state(work, state)


def tokenizer_of(name: str, texts: Iterable[str], work: Path) -> Tokenizer:
    """Return the tokenizer, kept in ``work``; ``bpe:N`` is trained once, on the first `TRAINING_BYTES` of ``texts``."""
    kept = work / TOKENIZER_FILE
    if kept.exists():
        return read_tokenizer(kept, name if name.startswith("bpe:") else "json")
    tokenizer = make_tokenizer(name, _at_most(texts, TRAINING_BYTES))
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.keep_special_tokens(work)
        write_inside(work, kept.name, tokenizer.to_json())
    return tokenizer


def _at_most(texts: Iterable[str], num_chars: int) -> Iterator[str]:
    """Yield the first texts until they have ``num_chars`` characters; the last one is not cut."""
    for text in texts:
        if num_chars <= 0:
            return
        num_chars -= len(text)
        yield text


def _write_ids(source: SyntheticTokens | TokenBins, job: _Job) -> _Written:
    """Write ids that are no text: a walk's, or those that another program wrote."""
    name = "none" if isinstance(source, SyntheticTokens) else job.spec.tokenizer
    tokenizer = read_tokenizer(Path(name[5:])) if name.startswith("json:") else None
    with ExitStack() as stack:
        writers = job.writers(dtype_for(source.vocab_size), stack)
        for split, ids in source.split(job.spec.val_fraction):
            writers[split].write(ids)
        splits = {split: writer.finish() for split, writer in writers.items()}
    name = name if tokenizer is None else tokenizer.name
    return _Written(splits, source.rule, tokenizer, name, source.vocab_size, job.fingerprint.num_documents)
