"""LoRA: the model's matrices are frozen, and some of them get a trained product of two narrow matrices added.

    y = x W^T + (alpha / rank) x A^T B^T        A [rank, in], B [out, rank]

Only A and B are trained, so gradients, fp32 master weights and optimizer states exist for a few percent of the
parameters. The layers are `peft`'s, unchanged, and so are the names of A and B in a checkpoint. B starts at zero, A
uniform in +-1 / sqrt(in). Each element depends on seed, name and index alone, as all initial values here do.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.host.errors import UserError, nearest_name
from zeroshard.models.adapters import ADAPTER, Lora, is_adapter
from zeroshard.models.base import LanguageModel, materialize, shapes_only
from zeroshard.models.head import Head
from zeroshard.models.quiet_import import quiet_import
from zeroshard.models.recompute import keep_random_state

ALL_LINEAR = "all-linear"


def built_with_lora(build: Callable[[], LanguageModel], lora: Lora) -> LanguageModel:
    """Call ``build`` and add adapters to its model; on the default device, or without values if that is ``"meta"``.

    Raises:
        UserError: as `add_lora`.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        model = build()
    add_lora(model, lora)
    materialize(model, device)
    return model


def add_lora(model: LanguageModel, lora: Lora) -> None:
    """Add adapters to ``model``, which must be on the meta device, and freeze all other parameters; in place.

    Raises:
        UserError: `peft` is not installed, or a target is not a linear layer of the model.
    """
    peft = _peft()
    named = dict(model.lora_root.named_modules())
    targets = list(lora.targets) or list(_default_targets(model))
    chosen = _layers(model, named, targets)
    transposed = {type(named[name]).__name__ == "Conv1D" for name in chosen}
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=chosen if ALL_LINEAR in targets else targets,
        fan_in_fan_out=True in transposed,
        task_type="CAUSAL_LM",
    )
    with shapes_only():  # not peft's own option for this, which patches a method of nn.Module in the whole process
        peft.inject_adapter_in_model(config, model.lora_root, ADAPTER)
    model.lora, model.lora_config = lora, config
    added = [param for name, param in model.named_parameters() if is_adapter(name)]
    model.num_frozen_multiplied_params = model.num_multiplied_params
    model.num_multiplied_params += sum(param.numel() for param in added)
    if lora.dropout:
        keep_random_state(model.blocks)


def initial_adapters(model: LanguageModel) -> dict[str, Tensor]:
    """Return the initial values of all adapters by name, in fp32 on the CPU: a few percent of the model's size."""
    found = {}
    for name, param in model.named_parameters():
        if is_adapter(name):
            found[name] = torch.empty(param.shape)
            model.initial_value(name, found[name])
    return found


def _peft() -> Any:
    try:
        return quiet_import("peft")
    except ImportError:
        raise UserError("lora.rank", "adapters need the package peft", "pip install 'zeroshard[peft]'") from None


def _default_targets(model: LanguageModel) -> Iterable[str]:
    kind = model.architecture
    known = import_module("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if not isinstance(known.get(kind), list | tuple):
        names = ", ".join(_last_parts(_linear_in_blocks(model)))
        what = f"peft has no targets of its own for {kind or type(model).__name__}"
        raise UserError("lora.targets", what, f"name some of {names}; or {ALL_LINEAR}")
    return known[kind]


def _layers(model: LanguageModel, named: dict[str, nn.Module], targets: list[str]) -> list[str]:
    """Return the full names of the layers that ``targets`` select."""
    chosen: list[str] = []
    for target in targets:
        if target == ALL_LINEAR:
            chosen += _linear_in_blocks(model)
            continue
        found = [name for name in named if name == target or name.endswith(f".{target}")]
        if not found:
            known = _last_parts(_linear_in_blocks(model))
            close = nearest_name(target, known)
            hint = "" if close is None else f"did you mean {close}? "
            what = f"{target!r} is no layer of the model"
            raise UserError("lora.targets", what, f"{hint}known: {', '.join(known)}; or {ALL_LINEAR}")
        for name in found:
            _require_linear(model, name, named[name])
        chosen += found
    return sorted(set(chosen))


def _require_linear(model: LanguageModel, name: str, layer: nn.Module) -> None:
    todo = f"name linear layers: {', '.join(_last_parts(_linear_in_blocks(model)))}; or {ALL_LINEAR}"
    if not _is_linear(layer):
        raise UserError("lora.targets", f"{name} is a {type(layer).__name__}, and no linear layer", todo)
    every = [param for _, param in model.lora_root.named_parameters(remove_duplicate=False)]
    if sum(param is layer.weight for param in every) > 1:
        raise UserError("lora.targets", f"{name} shares its matrix with another layer", todo)


def _linear_in_blocks(model: LanguageModel) -> list[str]:
    inside = {id(module) for module in model.blocks.modules()}
    return [name for name, each in model.lora_root.named_modules() if id(each) in inside and _is_linear(each)]


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) in (nn.Linear, Head) or type(layer).__name__ == "Conv1D"


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})
