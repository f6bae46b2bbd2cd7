"""Reads a Hugging Face folder through the `ShardReader` interface, so that it loads into a strategy like a checkpoint.

Each rank reads only the elements of its shard. A matrix that the files store transposed, as GPT-2's, is read entirely
to get any part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.host.errors import UserError
from zeroshard.models import LanguageModel
from zeroshard.models.hugging_face.config import HuggingFaceConfig
from zeroshard.models.hugging_face.gpt2_llama_conversion import HFWeight, OurConfig, find_weights
from zeroshard.models.hugging_face.model import INNER, HuggingFaceModel
from zeroshard.models.hugging_face.weights import (
    DTYPES,
    FileTensor,
    FileWeights,
    are_equal,
    find_tensors,
    read_elements,
)
from zeroshard.optim.named_shards import ShardReader


def reader_of(folder: Path, model: LanguageModel) -> ShardReader:
    """Return a reader of the weights in ``folder``, by the parameter names of ``model`` without adapters.

    Args:
        folder: contains ``config.json`` and safetensors files.
        model: GPT-2, LLaMA, or a model of `transformers`; only its configuration is used, so it may be sharded.

    Raises:
        UserError: a tensor is missing, has no counterpart in the model, or has another shape; names the tensor.
    """
    if isinstance(model.config, HuggingFaceConfig):
        return _OfTransformers(model.config, folder)
    if not isinstance(model.config, OurConfig):
        what = f"{folder} is a Hugging Face folder, whose names a {type(model).__name__} does not have"
        raise UserError("init_from", what, "give a run or a checkpoint of that model")
    return _OfOurs(tensors_of(model.config, find_tensors(folder)))


def tensors_of(config: OurConfig, tensors: Mapping[str, FileTensor]) -> dict[str, tuple[FileTensor, HFWeight]]:
    """Return by our name of each parameter of a GPT-2 or LLaMA its tensor in files, and how that differs from ours.

    Raises:
        UserError: as `find_weights`; or a tensor is quantised; or a tied head is there and differs from the embedding.
    """
    found = find_weights(config, {name: tensor.shape for name, tensor in tensors.items()})
    for name in found:
        if tensors[name].dtype not in DTYPES:
            raise UserError(name, f"is of dtype {tensors[name].dtype}", "take a model that is not quantised")
    head = found.pop("lm_head.weight", None) if config.tie_embeddings else None
    ours = {weight.name: (tensors[name], weight) for name, weight in found.items() if weight.name is not None}
    if head is not None:
        assert head.name is not None
        embedding = ours[head.name][0]
        if not are_equal(tensors["lm_head.weight"], embedding):
            what = f"is tied to {embedding.name} and differs from it"
            raise UserError("lm_head.weight", what, "correct tie_word_embeddings in config.json")
    return ours


class _OfTransformers:
    """Reads weights for a model of `transformers`, as float32."""

    def __init__(self, config: HuggingFaceConfig, folder: Path) -> None:
        with torch.device("meta"):
            model = config.build()
        assert isinstance(model, HuggingFaceModel)
        self._weights = FileWeights(model.hf, folder)
        buffers = {name for name, _ in model.hf.named_buffers()}
        self._kinds = {
            INNER + name: {"buffer" if name in buffers else "param": tuple(tensor.shape)}
            for name, tensor in model.hf.state_dict(keep_vars=True).items()
            if name in self._weights
        }

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        return self._kinds.get(name, {})

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        values = torch.empty(interval[1] - interval[0])
        self._weights.fill(name.removeprefix(INNER), values, interval[0])
        return values


class _OfOurs:
    """Reads weights for our GPT-2 or LLaMA, as float32."""

    def __init__(self, found: Mapping[str, tuple[FileTensor, HFWeight]]) -> None:
        self._found = found

    def kinds(self, name: str) -> Mapping[str, tuple[int, ...]]:
        return {"param": self._found[name][1].shape} if name in self._found else {}

    def read(self, name: str, kind: str, interval: tuple[int, int]) -> Tensor:
        (tensor, weight), (start, stop) = self._found[name], interval
        if not weight.transposed:
            values = torch.empty(stop - start)
            read_elements(tensor, start, values)
            return values
        whole = torch.empty(tensor.numel)
        read_elements(tensor, 0, whole)
        return whole.view(weight.hf_shape).t().reshape(-1)[start:stop].clone()
