"""``zeroshard export``: write a run's weights as a folder that Hugging Face's `transformers` opens.

    OUT/config.json              the model's configuration
    OUT/model.safetensors        or model-00001-of-00003.safetensors ... and model.safetensors.index.json
    OUT/tokenizer.json           and tokenizer_config.json, if the run has a tokenizer

Tensors are copied from the checkpoint's files to the new ones one at a time, so the model is never in memory as a
whole. `transformers` is needed only to export a run of an ``hf:`` model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard import checkpoint
from zeroshard.checkpoint.consolidated import verified_manifest
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.read_as import MergedWeights, transposed_weights
from zeroshard.checkpoint.streamed_safetensors import StreamedTensor, drafted, intervals, write_streamed
from zeroshard.data import Tokenizer
from zeroshard.data.portable import portable
from zeroshard.data.special_tokens import GENERATION_CONFIG, TOKENIZER_CONFIG, special_tokens_of
from zeroshard.data.tokenizer import TOKENIZER_FILE, BpeTokenizer
from zeroshard.host.columns import printable
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.host.regular_files import link_in
from zeroshard.integrations import hf_folder_export
from zeroshard.integrations.rounded_base import losses_said
from zeroshard.models import model_config
from zeroshard.models.adapters import Lora, base_name
from zeroshard.models.hugging_face.folder import is_hugging_face
from zeroshard.models.hugging_face.gpt2_llama_conversion import HFWeight, OurConfig, hf_config, hf_weights, published
from zeroshard.models.hugging_face.model import HuggingFaceModel
from zeroshard.optim.named_shards import FROZEN, ShardReader
from zeroshard.optim.state_conversion import FullWeights
from zeroshard.settings.sizes import parse_size
from zeroshard.settings.validate import validate
from zeroshard.train.config.command_settings import ExportConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.named_code import require_trust
from zeroshard.train.setup.assemble import lora_of, make_model, model_overrides
from zeroshard.train.setup.hugging_face import kept_folder
from zeroshard.train.setup.init_from import SeenAs, whole
from zeroshard.train.setup.run_folder import kept_tokenizer, tokenizer_folder
from zeroshard.train.state.folders import checkpoint_folder
from zeroshard.train.state.saved_run import newest_checkpoint
from zeroshard.zero.ema.average import EMA

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_EMBEDDINGS = ("wte.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class _Source:
    """The checkpoint that is exported, and what belongs to it."""

    folder: Path
    manifest: Manifest
    model: OurConfig | HuggingFaceModel
    run: Path
    tokenizer: Tokenizer | None
    kind: str  # kind of the saved weights: "param", or `EMA` for their moving average
    lora: Lora | None = None
    transposed: frozenset[str] = frozenset()
    seen_whole: SeenAs = lambda reader: reader
    rounded: TrainConfig | None = None  # the settings of a run that saw its base in fewer bits


def run_export(config: ExportConfig) -> int:
    """Write the Hugging Face folder that ``config`` asks for, print a summary, and return the exit status.

    Raises:
        UserError: there is no run or checkpoint; the checkpoint is damaged, or has no weights of the requested kind or
            no model that can be exported; or ``out`` exists already.
    """
    source = _open(config)
    out, dtype = Path(config.out), _DTYPES[config.dtype]
    with checkpoint.CheckpointReader(source.folder, source.manifest) as saved, drafted(out) as draft:
        reader = source.seen_whole(FullWeights(saved))
        if isinstance(source.model, HuggingFaceModel) and source.lora and not config.merged:
            num_bytes = hf_folder_export.write_adapters(draft, source.model, reader, source.kind, dtype)
            hf_folder_export.copy_text_files(source.run, draft, source.tokenizer)
            seen = "" if source.rounded is None else f" (trained over it in {source.rounded.base.format})"
            what = f"adapters of {hf_folder_export.base_of(source.model)}{seen}, {config.dtype}, {num_bytes:,} bytes"
            described = f"step {source.manifest.step} of {config.source} in {config.out}: {what}"
            print(printable(f"{described}; --merged writes the whole model"))
            return int(ExitStatus.OK)
        merged = MergedWeights(reader, source.lora.scale, source.transposed) if source.lora else reader
        if isinstance(source.model, HuggingFaceModel):
            tensors = hf_folder_export.streamed_tensors(source.model, merged, source.kind, dtype)
        else:
            tensors = [_streamed(merged, weight, source.kind, dtype) for weight in hf_weights(source.model)]
        files = split_by_size(tensors, parse_size("max_shard_size", config.max_shard_size))
        for name, members in files.items():
            write_streamed(draft / name, members, {"format": "pt"})
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        if len(files) > 1:
            places = {tensor.name: name for name, members in files.items() for tensor in members}
            index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
            _write_json(draft / "model.safetensors.index.json", index)
        _describe(draft, source, config.dtype)
    what = f"{config.dtype}, {num_bytes:,} bytes in {len(files)} file{'s' if len(files) > 1 else ''}"
    kept = tokenizer_folder(source.run)
    text = f"no tokenizer: {'the run has no text' if kept.is_dir() else f'{kept} is not there'}"
    if source.tokenizer:
        text = f"tokenizer {source.tokenizer.name}"
    print(printable(f"step {source.manifest.step} of {config.source} in {out}: {what}, {text}"))
    if source.rounded is not None:
        num_params = num_bytes // dtype.itemsize
        print(printable(losses_said(source.run, source.folder, out, source.rounded, num_params)))
    return int(ExitStatus.OK)


def _describe(draft: Path, source: _Source, dtype: str) -> None:
    """Write the folder's ``config.json`` and the files of the tokenizer."""
    model, tokenizer = source.model, source.tokenizer
    if isinstance(model, HuggingFaceModel):
        _write_json(draft / "config.json", hf_folder_export.config_json(model, dtype))
        if hf_folder_export.copy_text_files(source.run, draft, tokenizer):
            return
        seq_len = model.config.seq_len
    else:
        marks: dict[str, int | None] = {}
        if tokenizer:
            # The id that begins a text: as the tokenizer puts it there, else the one that the run knows by name.
            named = special_tokens_of(tokenizer_folder(source.run)).named.get("bos_token")
            begin = tokenizer.id_of(named) if named and isinstance(tokenizer, BpeTokenizer) else None
            marks = {"eos_id": tokenizer.eos_id, "bos_id": next(iter(tokenizer.around[0]), begin)}
        _write_json(draft / "config.json", hf_config(model, dtype=dtype, **marks))
        seq_len = model.seq_len
    if tokenizer:
        _write_tokenizer(draft, tokenizer, seq_len, source.run)


def split_by_size(tensors: Iterable[StreamedTensor], max_bytes: int) -> dict[str, list[StreamedTensor]]:
    """Assign tensors, in order, to files of at most ``max_bytes``, by file name; a larger tensor gets its own file."""
    groups: list[list[StreamedTensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if groups[-1] and tensor.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _open(config: ExportConfig) -> _Source:
    path = Path(config.source)
    run = path.parent.parent
    if (path / "config.toml").is_file():
        run, found = path, newest_checkpoint(checkpoint_folder(path))
        if found is None:
            raise UserError("source", f"{run} has no complete checkpoint yet", "let it train up to one first")
        path = found
    # what would be published may be a file of the user's own
    link = next(filter(None, map(link_in, (tokenizer_folder(run), kept_folder(run)))), None)
    if link is not None:
        raise UserError("source", f"{link} is a symbolic link", "put what it leads to in its place, or remove it")
    manifest = checkpoint.read_manifest(path)
    if not isinstance(manifest.extra.get("config"), dict):
        raise UserError("source", f"{path} does not say which model it is", "export a checkpoint of `zeroshard train`")
    trained = validate(TrainConfig, manifest.extra["config"])
    require_trust(trained.model, path, trusted=config.model.trust_remote_code)
    kind = EMA if config.weights == "ema" else "param"
    shapes = {base_name(tensor.name): tensor.shape for tensor in manifest.tensors if tensor.kind == kind}
    coded = {base_name(tensor.name) for tensor in manifest.tensors if tensor.kind == FROZEN}
    if not shapes:
        raise UserError("weights", f"{path} holds no moving average", "train with --ema-decay, or use --weights last")
    lora = lora_of(trained.lora)
    if config.merged and lora is None:
        raise UserError("merged", f"{path} has no adapters", "leave it out")
    tokenizer = kept_tokenizer(run, trained.data) if tokenizer_folder(run).is_dir() else None
    if is_hugging_face(trained.model.name):
        folder, manifest = verified_manifest(path)
        built = hf_folder_export.model_of(trained)
        seen_whole = whole(trained, built, rounded=False)
        facts = lora, transposed_weights(built), seen_whole, trained if trained.base.on else None
        return _Source(folder, manifest, built, run, tokenizer, kind, *facts)
    if lora is not None and not config.merged:
        what = f"the model under the adapters of {path} is a checkpoint's, which peft does not open"
        raise UserError("merged", what, "add --merged, which writes the whole model")
    vocab_size = next((shapes[name][0] for name in _EMBEDDINGS if name in shapes), None)
    overrides = model_overrides(trained.model)
    model = published(model_config(trained.model.name, vocab_size=vocab_size, overrides=overrides))
    for weight in hf_weights(model):
        if weight.name and weight.name not in coded and shapes.get(weight.name) != weight.shape:
            what = f"{path} has {weight.name} as {shapes.get(weight.name)}, its configuration as {weight.shape}"
            raise UserError("source", what, "export a checkpoint of `zeroshard train`")
    folder, manifest = verified_manifest(path)
    if not coded:
        return _Source(folder, manifest, model, run, tokenizer, kind, lora)
    built = make_model(trained, vocab_size or 1, "meta")
    facts = lora, frozenset[str](), whole(trained, built, rounded=False), trained
    return _Source(folder, manifest, model, run, tokenizer, kind, *facts)


def _streamed(reader: ShardReader, weight: HFWeight, kind: str, dtype: torch.dtype) -> StreamedTensor:
    numel = prod(weight.shape)

    def parts() -> Iterator[Tensor]:
        for interval in intervals(numel):
            if weight.name is None:
                yield torch.zeros(interval[1] - interval[0])
            else:
                yield reader.read(weight.name, kind, interval)

    def transpose() -> Iterator[Tensor]:
        assert weight.name is not None
        yield reader.read(weight.name, kind, (0, numel)).view(weight.shape).t()

    return StreamedTensor(weight.hf_name, dtype, weight.hf_shape, transpose if weight.transposed else parts)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, seq_len: int, run: Path) -> None:
    """Write the tokenizer, the special tokens that the run knows by name, its chat template and where texts end."""
    written, kept = portable(tokenizer), tokenizer_folder(run)
    (folder / TOKENIZER_FILE).write_text(written.json, encoding="utf-8")
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        **special_tokens_of(kept).named,
    }
    begins = written.bos_token or about.get("bos_token") or written.eos_token  # GPT-2 has one token for both
    about |= {"bos_token": begins} if begins else {}
    about |= {"eos_token": written.eos_token} if written.eos_token else {}
    _write_json(folder / TOKENIZER_CONFIG, about)
    if len(tokenizer.stop_ids) > 1:
        _write_json(folder / GENERATION_CONFIG, {"eos_token_id": list(tokenizer.stop_ids)})
    hf_folder_export.write_template(kept, folder)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
