"""Export a run's adapters as a folder that `peft.PeftModel.from_pretrained` loads on top of their base model.

OUT/adapter_config.json         peft's configuration, with the base model's folder or name
OUT/adapter_model.safetensors   A and B of each adapted layer
OUT/tokenizer.json              and the model's other text files
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from zeroshard import checkpoint
from zeroshard.checkpoint.streamed_safetensors import StreamedTensor, write_streamed
from zeroshard.models import LanguageModel
from zeroshard.models.adapters import ADAPTER, is_adapter
from zeroshard.models.hugging_face.model import INNER, HuggingFaceModel

_PREFIX = "base_model.model."  # prefix that peft adds to the base model's names


def write_adapters(
    draft: Path, model: HuggingFaceModel, reader: checkpoint.CheckpointReader, kind: str, dtype: torch.dtype
) -> int:
    """Write configuration and weights of the adapters into ``draft``, and return the weights' size in bytes.

    Args:
        draft: an existing folder.
        model: model with adapters, without values.
        reader: reader of a checkpoint of the model.
        kind: kind of the saved weights, such as ``"param"``.
        dtype: dtype of the weights in the file.
    """
    tensors = []
    for name in sorted(name for name, _ in model.named_parameters() if is_adapter(name)):
        shape = reader.kinds(name)[kind]

        def parts(name: str = name, numel: int = prod(shape)) -> tuple[torch.Tensor]:
            return (reader.read(name, kind, (0, numel)),)

        key = _PREFIX + name.removeprefix(INNER).replace(f".{ADAPTER}.", ".")
        tensors.append(StreamedTensor(key, dtype, shape, parts))
    write_streamed(draft / "adapter_model.safetensors", tensors, {"format": "pt"})
    config = model.lora_config
    config.base_model_name_or_path, config.inference_mode = base_of(model), True
    config.save_pretrained(str(draft))
    return sum(tensor.num_bytes for tensor in tensors)


def base_of(model: LanguageModel) -> str:
    """Return where `peft` finds the base model: the absolute path of a folder, or a name on the hub."""
    assert isinstance(model, HuggingFaceModel)
    source = model.config.source
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else source
