"""Export a run of a Hugging Face model (``--model hf:``) as a folder in the format that it was loaded from.

    OUT/config.json              the original model's, with the dtype of the new files
    OUT/model.safetensors        or several with an index; names and forms are those that `transformers` writes
    OUT/tokenizer.json           and the chat template and the model's other text files

Of a run with adapters the folder is one that `peft.PeftModel.from_pretrained` loads on top of their base model:

    OUT/adapter_config.json         peft's configuration, with the base model's folder or name
    OUT/adapter_model.safetensors   A and B of each adapted layer

Tensors are copied from the checkpoint's files to the new ones one at a time; each expert of a mixture is copied by
itself if `transformers` stores it by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.streamed_safetensors import StreamedTensor, intervals, write_streamed
from zeroshard.data import Tokenizer
from zeroshard.data.chat_templates import JINJA_FILE, JSON_FILE, own_template
from zeroshard.data.special_tokens import TOKENIZER_CONFIG, json_object
from zeroshard.data.tokenizer import TOKENIZER_FILE, BpeTokenizer, read_tokenizer
from zeroshard.host.errors import UserError
from zeroshard.host.regular_files import copy_inside
from zeroshard.models.adapters import ADAPTER, is_adapter
from zeroshard.models.hugging_face.model import INNER, HuggingFaceModel
from zeroshard.models.hugging_face.weights import FilePart, file_layout
from zeroshard.optim.named_shards import ShardReader
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.assemble import make_model
from zeroshard.train.setup.hugging_face import kept_folder
from zeroshard.train.setup.run_folder import tokenizer_folder

_PREFIX = "base_model.model."  # prefix that peft adds to the base model's names


def model_of(trained: TrainConfig) -> HuggingFaceModel:
    """Build the model of a run, without values."""
    model = make_model(trained, 1, "meta")
    assert isinstance(model, HuggingFaceModel)
    return model


def streamed_tensors(
    model: HuggingFaceModel, reader: ShardReader, kind: str, dtype: torch.dtype
) -> list[StreamedTensor]:
    """Return the tensors of the new files; each is read from the checkpoint when it is written.

    Raises:
        UserError: the checkpoint is not one of this model.
    """
    buffers = {name for name, _ in model.hf.named_buffers()}
    tensors = []
    for part in file_layout(model.hf):
        of_kind = "buffer" if part.source in buffers else kind
        if of_kind not in reader.kinds(INNER + part.source):
            what = f"the checkpoint has no {part.source}"
            raise UserError("source", what, "export a checkpoint of `zeroshard train`")
        tensors.append(_streamed(reader, part, of_kind, dtype))
    return tensors


def _streamed(reader: ShardReader, part: FilePart, kind: str, dtype: torch.dtype) -> StreamedTensor:
    def parts() -> Iterator[Tensor]:
        for first, last in intervals(prod(part.shape)):
            yield reader.read(INNER + part.source, kind, (part.start + first, part.start + last))

    return StreamedTensor(part.name, dtype, part.shape, parts)


def write_adapters(draft: Path, model: HuggingFaceModel, reader: ShardReader, kind: str, dtype: torch.dtype) -> int:
    """Write configuration and weights of the adapters into ``draft``, and return the weights' size in bytes.

    Args:
        draft: an existing folder.
        model: model with adapters, without values.
        reader: reader of a checkpoint of the model.
        kind: kind of the saved weights, such as ``"param"``.
    """
    tensors = []
    for name in sorted(name for name, _ in model.named_parameters() if is_adapter(name)):
        shape = reader.kinds(name)[kind]

        def parts(name: str = name, numel: int = prod(shape)) -> tuple[Tensor]:
            return (reader.read(name, kind, (0, numel)),)

        key = _PREFIX + name.removeprefix(INNER).replace(f".{ADAPTER}.", ".")
        tensors.append(StreamedTensor(key, dtype, shape, parts))
    write_streamed(draft / "adapter_model.safetensors", tensors, {"format": "pt"})
    config = model.lora_config
    config.base_model_name_or_path, config.inference_mode = base_of(model), True
    config.save_pretrained(str(draft))
    return sum(tensor.num_bytes for tensor in tensors)


def base_of(model: HuggingFaceModel) -> str:
    """Return where `peft` finds the base model: the absolute path of a folder, or a name on the hub."""
    folder = Path(model.config.source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model.config.source


def config_json(model: HuggingFaceModel, dtype: str) -> dict[str, Any]:
    """Return the content of the exported model's ``config.json``."""
    raw = json.loads(model.config.config_json)
    raw["torch_dtype" if "torch_dtype" in raw else "dtype"] = dtype
    return {**raw, "architectures": [type(model.hf).__name__]}


def copy_text_files(run: Path, out: Path, tokenizer: Tokenizer | None) -> bool:
    """Copy the model's text files; return False, without a copy, if the run has none or another tokenizer."""
    kept = kept_folder(run)
    if not kept.is_dir() or not any(kept.iterdir()):
        return False
    if tokenizer is not None:
        file = kept / TOKENIZER_FILE
        if not (isinstance(tokenizer, BpeTokenizer) and file.is_file()):
            return False
        if read_tokenizer(file).to_json() != tokenizer.to_json():
            return False
    for path in kept.iterdir():
        copy_inside(path, out, follow=False)
    write_template(tokenizer_folder(run), out)
    return True


def write_template(kept: Path, out: Path) -> None:
    """Write the chat template of a run's tokenizer folder, if it has one, in place of any in ``out``."""
    text = own_template(kept)[0] if kept.is_dir() else ""
    if not text:
        return
    (out / JINJA_FILE).write_text(text, encoding="utf-8")
    (out / JSON_FILE).unlink(missing_ok=True)
    config = dict(json_object(out / TOKENIZER_CONFIG))
    if config.pop("chat_template", None):
        (out / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
