"""Prepare tokens once: read a source, split it, encode it, and publish the folder complete or not at all.

Text is encoded by several processes, both of tables (`bulk`) and of other files (`encode`). If several processes
prepare the same folder at once, one wins, and the others use its result (see `publish`). An existing folder is reused
if it was made with the same choices from the same content, by sha256; otherwise the difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from zeroshard.data import bulk
from zeroshard.data.bins import BIN_SPLIT, TokenBins
from zeroshard.data.documents import Fingerprint
from zeroshard.data.encode import Piece, encode_pieces, keep_for_workers, pieces_of, train_texts
from zeroshard.data.examples.prepare import prepare_examples
from zeroshard.data.files import is_address
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
from zeroshard.data.prepared import is_prepared, say, tables_fingerprint, without_rules
from zeroshard.data.publish import draft_of, publish
from zeroshard.data.registry import is_hub_name, source_entry
from zeroshard.data.sources import Source, SyntheticSize, SyntheticTokens, left_out_of, open_source
from zeroshard.data.spec import DataSpec
from zeroshard.data.split import MANY_DOCUMENTS, Holdout
from zeroshard.data.tables import PART_BYTES, Tables, corpus_identity, count_documents
from zeroshard.data.tokenizer import (
    BpeTokenizer,
    Tokenizer,
    eos_id_of,
    known_vocab_size,
    make_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from zeroshard.data.tokens import DEFAULT_SHARD_TOKENS, TokenWriter
from zeroshard.errors import UserError
from zeroshard.process import num_cpus

Progress = Callable[[int, int], None]


def prepare(
    spec: DataSpec,
    out: Path,
    progress: Progress | None = None,
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    num_workers: int = 0,
    told: Callable[[bulk.Told], None] | None = None,
) -> Path:
    """Write the tokens of ``spec`` into the folder ``out``, unless they exist already.

    Tables are read by several processes, and an interrupted preparation is resumed (see `bulk`).

    Args:
        spec: what to prepare.
        out: the folder; it is made, with its parents.
        progress: called now and then with ``(done, total)``: bytes of the source, or tokens if it has no text.
        shard_tokens: tokens per file.
        num_workers: processes that encode; 0 for one per core, fewer if there is little to encode. The files do not
            depend on it.
        told: called now and then with the progress while tables are read.

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
    for line in left_out_of(source):
        say(line)
    if spec.format != "text":
        return prepare_examples(spec, source, out, shard_tokens, lambda: _open(spec))
    if isinstance(source, Tables):
        workers = num_workers or _workers_for(source.num_bytes)
        return _prepare_tables(spec, source, out, shard_tokens, workers, told or _untold)
    fingerprint = source.fingerprint()
    if is_prepared(spec.identity(), fingerprint, out):
        return out
    with draft_of(out) as draft:
        is_encoded = source_entry(spec.source).has_text and spec.tokenizer != "bytes"  # encoding is slow
        num_workers = num_workers or (_workers_for(fingerprint.num_bytes) if is_encoded else 1)
        _write(spec, source, fingerprint, draft, progress or _silent, shard_tokens, num_workers)
        if source.fingerprint() != fingerprint:
            raise UserError("data.path", f"{source.description} changed while it was read", "try again")
        _publish(draft, out, spec, fingerprint)
    return out


def _open(spec: DataSpec) -> Source:
    size = SyntheticSize(spec.vocab_size, spec.num_tokens, spec.seed)
    vocab_size = None
    if spec.source == "bin" and spec.tokenizer != "none":
        vocab_size = known_vocab_size(spec.tokenizer)
    row_key = spec.column if spec.format == "text" else spec.columns[0]
    return open_source(spec.source, spec.paths, size, column=spec.column, vocab_size=vocab_size, row_key=row_key)


def _publish(draft: Path, out: Path, spec: DataSpec, fingerprint: Fingerprint) -> None:
    if not publish(draft, out, META_NAME) and not is_prepared(spec.identity(), fingerprint, out):
        raise UserError("data.dir", f"{out} was removed while it was prepared", "try again")


def holdout_of(tables: Tables, val_fraction: float) -> Holdout:
    """Return the rule that splits ``tables``; reads a few documents. Raises UserError if they cannot be read."""
    return Holdout(val_fraction, count_documents(tables, MANY_DOCUMENTS))


def _workers_for(num_bytes: int) -> int:
    """Return a number of workers; a process costs a second to start, so a few megabytes are encoded in this one."""
    return min(num_cpus(), max(1, num_bytes // PART_BYTES))


def _prepare_tables(
    spec: DataSpec,
    tables: Tables,
    out: Path,
    shard_tokens: int,
    num_workers: int,
    told: Callable[[bulk.Told], None],
) -> Path:
    fingerprint = tables_fingerprint(tables)
    if is_prepared(spec.identity(), fingerprint, out):
        return out
    holdout = holdout_of(tables, spec.val_fraction)
    files = corpus_identity(tables.files).splitlines()
    plan = {**spec.identity(), "split": holdout.rule, "shard_tokens": shard_tokens, "files": files}
    is_local = not any(is_address(file.path) for file in tables.files)
    with bulk.work_folder(out, plan) as work, bulk.removed_if_refused(work, needed=not is_local):
        if is_prepared(spec.identity(), fingerprint, out):  # by the process that had the lock before us
            bulk.remove(work)
            return out
        tokenizer = bulk.tokenizer_of(spec.tokenizer, tables, holdout, work)
        dtype = dtype_for(tokenizer.vocab_size)
        sizes = (spec.max_tokens, shard_tokens)
        joined = bulk.join_parts(
            tables, spec.tokenizer, dtype, holdout, *sizes, work, num_workers=num_workers, progress=told
        )
        _require_tokens({split: meta.num_tokens for split, meta in joined.splits.items()}, spec.val_fraction)
        if _open(spec) != tables:
            bulk.remove(work)
            raise UserError("data.path", f"{tables.files[0].path} or another file changed meanwhile", "try again")
        draft = work / "draft"
        tokenizer_sha256 = write_tokenizer(draft, tokenizer) if isinstance(tokenizer, BpeTokenizer) else ""
        source = SourceMeta(_described(spec, tables), fingerprint.num_bytes, joined.num_documents, fingerprint.sha256)
        recorded, named = spec.identity() | {"split": holdout.rule}, (tokenizer.name, tokenizer_sha256)
        meta = DataMeta(recorded, source, *named, tokenizer.vocab_size, dtype, joined.splits, tokenizer.eos_id)
        write_meta(draft, meta)
        _publish(draft, out, spec, fingerprint)
        bulk.remove(work)
    return out


def _described(spec: DataSpec, tables: Tables) -> str:
    if spec.paths:
        return ", ".join(spec.paths)
    return f"{spec.source}: {tables.files[0].path}" + (f" and {len(tables.files) - 1} more" * (len(tables.files) > 1))


def _untold(told: bulk.Told) -> None:
    """Ignore progress."""


def _silent(done: int, total: int) -> None:
    """Ignore progress."""


def _write(
    spec: DataSpec,
    source: Source,
    fingerprint: Fingerprint,
    draft: Path,
    progress: Progress,
    shard_tokens: int,
    num_workers: int,
) -> None:
    assert not isinstance(source, Tables)
    tokenizer: Tokenizer | None = None
    holdout = Holdout(spec.val_fraction, fingerprint.num_documents)
    rule = BIN_SPLIT if isinstance(source, TokenBins) else ""
    if isinstance(source, SyntheticTokens | TokenBins):
        name, vocab_size = "none", source.vocab_size
        if isinstance(source, TokenBins) and spec.tokenizer != "none":
            name = "json" if spec.tokenizer.startswith("json:") else spec.tokenizer
            tokenizer = read_tokenizer(Path(spec.tokenizer[5:])) if name == "json" else None
    else:
        texts = bulk.at_most(train_texts(source, holdout), bulk.TRAINING_BYTES)
        tokenizer = make_tokenizer(spec.tokenizer, texts)
        name, vocab_size, rule = tokenizer.name, tokenizer.vocab_size, holdout.rule
        keep_for_workers(draft, tokenizer)
    dtype = dtype_for(vocab_size)
    limits = bulk.token_limits(spec.max_tokens, spec.val_fraction)
    if isinstance(source, TokenBins) and source.can_be_mapped(DTYPES[dtype]):
        splits = _map_bins(spec, source, fingerprint, limits, progress, shard_tokens)
    else:
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(TokenWriter(draft, split, dtype, shard_tokens, limits[split]))
                for split in SPLITS
            }
            if isinstance(source, SyntheticTokens):
                _write_synthetic(spec, source, writers, progress)
            elif isinstance(source, TokenBins):
                _write_bins(spec, source, fingerprint, writers, progress)
            else:
                assert tokenizer is not None
                pieces = pieces_of(source, holdout, writers)
                encoded = encode_pieces(pieces, tokenizer, writers, draft, spec.tokenizer, dtype, num_workers)
                _follow(encoded, fingerprint.num_bytes, progress)
            splits = {split: writer.finish() for split, writer in writers.items()}
    _require_tokens({split: meta.num_tokens for split, meta in splits.items()}, spec.val_fraction)
    tokenizer_sha256 = write_tokenizer(draft, tokenizer) if isinstance(tokenizer, BpeTokenizer) else ""
    source_meta = SourceMeta(source.description, **asdict(fingerprint))
    eos_id = eos_id_of(name) if tokenizer is None else tokenizer.eos_id
    recorded = spec.identity() | ({"split": rule} if rule else {})
    write_meta(draft, DataMeta(recorded, source_meta, name, tokenizer_sha256, vocab_size, dtype, splits, eos_id))


def _follow(encoded: Iterable[Piece], num_bytes: int, progress: Progress) -> None:
    """Report the progress of each piece that was encoded and written."""
    done = 0
    for piece in encoded:
        done += len(piece.text.encode())
        progress(min(done, num_bytes), num_bytes)


def _map_bins(
    spec: DataSpec,
    source: TokenBins,
    fingerprint: Fingerprint,
    limits: dict[str, int | None],
    progress: Progress,
    shard_tokens: int,
) -> dict[str, SplitMeta]:
    """Map the files in place; read them once for their sha256."""
    done = 0

    def told(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(min(done, fingerprint.num_bytes), fingerprint.num_bytes)

    return source.mapped(spec.val_fraction, limits, shard_tokens, told)


def _write_synthetic(
    spec: DataSpec, source: SyntheticTokens, writers: dict[str, TokenWriter], progress: Progress
) -> None:
    """Write the walk; its last ``val_fraction`` is the validation split."""
    num_train, done = source.num_tokens - int(source.num_tokens * spec.val_fraction), 0
    for block in source.blocks():
        cut_at = min(max(num_train - done, 0), block.size)
        writers["train"].write(block[:cut_at])
        writers["val"].write(block[cut_at:])
        done += block.size
        progress(done, source.num_tokens)


def _write_bins(
    spec: DataSpec, source: TokenBins, fingerprint: Fingerprint, writers: dict[str, TokenWriter], progress: Progress
) -> None:
    done = 0
    for split, ids in source.split(spec.val_fraction):
        writers[split].write(ids)
        done += ids.nbytes
        progress(min(done, fingerprint.num_bytes), fingerprint.num_bytes)


def _require_tokens(num_tokens: dict[str, int], val_fraction: float) -> None:
    if not num_tokens["train"]:
        raise UserError("data", "no tokens are left to train on", "use more text or a smaller data.val_fraction")
    if val_fraction and not num_tokens["val"]:
        raise UserError(
            "data.val_fraction",
            f"{val_fraction:g} of this source is less than one token",
            "use more text, a larger fraction, or 0 for no validation",
        )
