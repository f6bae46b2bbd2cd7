"""LoRA: the model's matrices are frozen, and some of them get a trained product of two narrow matrices added.

    y = x W^T + (alpha / rank) x A^T B^T        A [rank, in], B [out, rank]

Only A and B are trained, so gradients, fp32 master weights and optimizer states exist for a few percent of the
parameters. The layers are `peft`'s, unchanged, and so are the names of A and B in a checkpoint. B starts at zero, A
uniform in +-1 / sqrt(in). Each element depends on seed, name and index alone, as all initial values here do.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections import Counter
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
TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}  # `peft`'s own of our architectures, without its import


class LayerOfPlans(nn.Module):
    """`peft`'s layer as far as a plan sees it: its parameters by name, and its operations.

    To import `peft` takes more processor time than to trace a model.
    """

    def __init__(self, base_layer: nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.base_layer, self._scale = base_layer, lora.scale
        size, rank = (base_layer.in_features, base_layer.out_features), lora.rank
        self.lora_dropout = nn.ModuleDict({ADAPTER: nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({ADAPTER: nn.Linear(size[0], rank, bias=False)})
        self.lora_B = nn.ModuleDict({ADAPTER: nn.Linear(rank, size[1], bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, and that of the adapter."""
        result = self.base_layer(x)
        narrow: Any = self.lora_A[ADAPTER]
        wide = self.lora_B[ADAPTER]
        x = x.to(narrow.weight.dtype)
        return (result + wide(narrow(self.lora_dropout[ADAPTER](x))) * self._scale).to(result.dtype)


def built_with_lora(build: Callable[[], LanguageModel], lora: Lora, *, for_plan: bool = False) -> LanguageModel:
    """Call ``build`` and add adapters to its model; on the default device, or without values if that is ``"meta"``.

    ``for_plan``: only to be traced, with `LayerOfPlans` where that stands for `peft`'s layer.

    Raises:
        UserError: as `add_lora`.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        model = build()
    add_lora(model, lora, for_plan=for_plan)
    materialize(model, device)
    return model


def add_lora(model: LanguageModel, lora: Lora, *, for_plan: bool = False) -> None:
    """Add adapters to ``model``, which must be on the meta device, and freeze all other parameters; in place.

    ``for_plan``: as of `built_with_lora`.

    Raises:
        UserError: `peft` is not installed, or a target is not a linear layer of the model.
    """
    named = dict(model.lora_root.named_modules())
    targets = list(lora.targets) or list(_default_targets(model))
    chosen = _layers(model, named, targets)
    layers = [named[name] for name in chosen]
    if for_plan and all(isinstance(layer, nn.Linear) for layer in layers):
        model.requires_grad_(False)
        with shapes_only():
            for name in chosen:
                layer: Any = named[name]
                model.lora_root.set_submodule(name, LayerOfPlans(layer, lora))
    else:
        model.lora_config = _injected(model, lora, chosen if ALL_LINEAR in targets else targets, layers)
    model.lora = lora
    added = [param for name, param in model.named_parameters() if is_adapter(name)]
    model.num_frozen_multiplied_params = model.num_multiplied_params
    model.num_multiplied_params += sum(param.numel() for param in added)
    if lora.dropout:
        keep_random_state(model.blocks)


def _injected(model: LanguageModel, lora: Lora, targets: list[str], layers: list[nn.Module]) -> Any:
    """Have `peft` add its layers; returns its configuration."""
    peft, transposed = _peft(), {type(layer).__name__ == "Conv1D" for layer in layers}
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=targets,
        fan_in_fan_out=True in transposed,
        task_type="CAUSAL_LM",
    )
    with shapes_only():  # not peft's own option for this, which patches a method of nn.Module in the whole process
        peft.inject_adapter_in_model(config, model.lora_root, ADAPTER)
    return config


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
    if kind in TARGETS:
        return TARGETS[kind]
    _peft()
    known = import_module("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if not isinstance(known.get(kind), list | tuple):
        names = ", ".join(_last_parts(_linear_in_blocks(model)))
        what = f"peft has no targets of its own for {kind or type(model).__name__}"
        raise UserError("lora.targets", what, f"name some of {names}; or {ALL_LINEAR}")
    return known[kind]


def _layers(model: LanguageModel, named: dict[str, nn.Module], targets: list[str]) -> list[str]:
    """Return the full names of the layers that ``targets`` select."""
    chosen: list[str] = []
    in_blocks = _linear_in_blocks(model)
    known = ", ".join(_last_parts(in_blocks))
    uses = Counter(id(param) for _, param in model.lora_root.named_parameters(remove_duplicate=False))
    for target in targets:
        if target == ALL_LINEAR:
            chosen += in_blocks
            continue
        found = [name for name in named if name == target or name.endswith(f".{target}")]
        if not found:
            close = nearest_name(target, _last_parts(in_blocks))
            hint = "" if close is None else f"did you mean {close}? "
            what = f"{target!r} is no layer of the model"
            raise UserError("lora.targets", what, f"{hint}known: {known}; or {ALL_LINEAR}")
        todo = f"name linear layers: {known}; or {ALL_LINEAR}"
        for name in found:
            layer: Any = named[name]
            if not _is_linear(layer):
                raise UserError("lora.targets", f"{name} is a {type(layer).__name__}, and no linear layer", todo)
            if uses[id(layer.weight)] > 1:
                raise UserError("lora.targets", f"{name} shares its matrix with another layer", todo)
        chosen += found
    return sorted(set(chosen))


def _linear_in_blocks(model: LanguageModel) -> list[str]:
    inside = {id(module) for module in model.blocks.modules()}
    return [name for name, each in model.lora_root.named_modules() if id(each) in inside and _is_linear(each)]


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) in (nn.Linear, Head) or type(layer).__name__ == "Conv1D"


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})
