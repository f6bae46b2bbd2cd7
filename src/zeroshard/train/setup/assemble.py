"""Builds from settings a model, its optimizer, and the strategy that shards or replicates them over ranks.

Nothing here uses a run folder, so training, evaluation and planning build the same model from the same settings.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.comm import Communicator
from zeroshard.host.errors import UserError
from zeroshard.kernels import OPERATIONS, describe
from zeroshard.kernels.adamw8bit import in_one_pass
from zeroshard.kernels.dispatch import left_to_compiler
from zeroshard.models import (
    GPT2Config,
    InitialValues,
    LanguageModel,
    LlamaConfig,
    SequenceParallel,
    build_model,
    materialize,
    nearest_preset,
)
from zeroshard.models.adapters import Lora
from zeroshard.models.base import place_buffers
from zeroshard.models.presets import model_config
from zeroshard.optim import AdamW8bit, FlashAdamW, MuonAdamW, decay_groups, muon_groups
from zeroshard.parallel import Setup, Strategy, build_strategy, strategy_entry
from zeroshard.settings import rules
from zeroshard.settings.local_steps import LocalStepsConfig, check_num_replicas
from zeroshard.settings.offload import OffloadConfig
from zeroshard.settings.optimizer import IN_8_BITS, WEIGHTS_IN_BF16
from zeroshard.settings.tables import LoraConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.model_section import ModelConfig
from zeroshard.train.setup.agree import agree_on, model_facts
from zeroshard.train.setup.compiled import compile_model
from zeroshard.train.setup.products_in_8_bits import multiply_in_8_bits
from zeroshard.zero import STAGES, LocalSteps, Offload, loaded_later
from zeroshard.zero.core.strategy import SHARD

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def take_dtype_of_weights(config: TrainConfig, model: nn.Module) -> None:
    """Make the weights of a model on the meta device bfloat16 if the run keeps them so, without fp32 masters."""
    if config.optimizer in WEIGHTS_IN_BF16 and config.dtype == "bfloat16":
        for param in model.parameters():
            param.data = param.data.to(torch.bfloat16)


def check_model(config: TrainConfig) -> None:
    """Raise UserError if the model's settings are wrong or ``seq_len`` is too long for it; builds nothing."""
    sizes = model_config(config.model.name, overrides=model_overrides(config.model))
    longest = sizes.seq_len
    rules.check_heads(config.sequence_parallel, sizes.n_head)
    if config.seq_len > longest:
        what = f"{config.seq_len} is above the {longest} of {config.model.name}"
        raise UserError("seq_len", what, f"use {longest} or less, or a model with longer sequences")


def check_adapters(config: TrainConfig) -> None:
    """Raise UserError if the model cannot have the adapters that ``config`` asks for; the data is not needed."""
    if config.lora.rank:
        make_model(config, max(config.model.vocab_size, 1), "meta")


def check_shard_size(config: TrainConfig, world_size: int) -> None:
    """Raise UserError if ``world_size`` does not fit a setting that groups ranks."""
    config.check_world(world_size)
    check_num_replicas(config, world_size)


def make_model(config: TrainConfig, vocab_size: int, device: torch.device | str) -> LanguageModel:
    """Build the model of ``config`` on ``device``; on ``"meta"`` without values."""
    with torch.device(device):
        model = build_model(
            config.model.name,
            vocab_size=vocab_size,
            overrides=model_overrides(config.model, config.tiles),
            seed=config.seed,
            kernels=config.kernels,
            lora=lora_of(config.lora),
        )
    model.matmul = config.matmul
    model.take_loss_options(config.optim.label_smoothing, config.optim.z_loss)
    return model


def shapes(config: TrainConfig, vocab_size: int, eos_id: int | None) -> LanguageModel:
    """The model of a run on the meta device, to plan with and to count its parameters."""
    model = make_model(config, vocab_size, "meta")
    take_dtype_of_weights(config, model)
    # Packed rows have an attention mask too, so any id stands for it.
    model.eos_id = 0 if eos_id is None and attention_boundary_setting(config) else eos_id
    return model


def lora_of(config: LoraConfig) -> Lora | None:
    """The adapters that the settings ask for; None if the model's own weights are trained."""
    return Lora(**config.model_dump()) if config.rank else None


def model_overrides(model: ModelConfig, tiles: str = "none") -> dict[str, object]:
    """The settings that replace the preset's values, ``tiles`` among them: all that differ from their defaults."""
    unset = ModelConfig().model_dump()
    changed = {name: value for name, value in model.model_dump().items() if name != "name" and value != unset[name]}
    if "tie_embeddings" in changed:
        changed["tie_embeddings"] = model.tie_embeddings == "yes"
    return changed if tiles == "none" else changed | {"tiles": tiles}


def model_table(config: GPT2Config | LlamaConfig) -> ModelConfig:
    """Express a model's configuration as a run's ``[model]`` table: the nearest preset, and the differences from it."""
    name, changes = nearest_preset(config)
    if "tie_embeddings" in changes:
        changes["tie_embeddings"] = "yes" if changes["tie_embeddings"] else "no"
    return ModelConfig.model_validate({"name": name, **changes, "vocab_size": config.vocab_size})


def separating_id(config: TrainConfig, eos_id: int | None) -> int | None:
    """The token id that ends a document and that attention must not cross; None if attention is not limited by an id.

    Raises:
        UserError: attention must stay inside documents, but the tokenizer has no id that ends them.
    """
    if not config.data.document_mask:
        return None
    if eos_id is None:
        todo = "use one that has, as gpt2 or bpe:N"
        what = f"the tokenizer {config.data.tokenizer} has no id that ends a document"
        raise UserError("data.document_mask", what, todo)
    return eos_id


def attention_boundary_setting(config: TrainConfig) -> str:
    """The name of the setting that keeps attention inside documents or examples; "" if none is on."""
    named = ("data.packing", "data.document_mask")
    return next((name for name in named if getattr(config.data, name.partition(".")[2])), "")


def sharded(
    config: TrainConfig,
    vocab_size: int,
    eos_id: int | None,
    comm: Communicator,
    device: torch.device,
    *,
    draw: bool = True,
) -> tuple[LanguageModel, Strategy]:
    """Build the model of ``config`` and the strategy that trains it, on this rank's ``device``; collective.

    With our strategies each rank draws the initial weights of its own shard. With PyTorch's strategies rank 0 draws
    them, one parameter at a time, and the other ranks receive them. Without ``draw``, before a checkpoint is loaded,
    weights are NaN until then. Attention does not cross tokens of ``eos_id``.

    Raises:
        UserError: the model has fewer ids than ``vocab_size``, or ranks have different models.
    """
    if 0 < config.model.vocab_size < vocab_size:
        what = f"{config.model.vocab_size} is below the {vocab_size} ids of the tokens"
        raise UserError("model.vocab_size", what, "use tokens made for this model, or 0 for a vocabulary of their size")
    from_meta = strategy_entry(config.strategy).from_meta
    model = make_model(config, vocab_size, "meta")
    take_dtype_of_weights(config, model)
    if draw:
        model.check_initial_values()
    place_buffers(model, device)
    if not from_meta:
        materialize(model, device, draw=draw and comm.rank == 0)
    model.eos_id = eos_id
    if attention_boundary_setting(config):
        model.require_positions(attention_boundary_setting(config))
    if config.shares_sequences:
        model.share_sequences(SequenceParallel.of(comm, config.sequence_parallel, longest=config.seq_len))
    if config.matmul == "fp8":
        multiply_in_8_bits(model, device)
    if config.compile == "on":
        compile_model(model, config.compile_backend, device)

    agree_on(comm, model_facts(model))
    optimizer_cls, optimizer_kwargs = _optimizer(config)
    setup = Setup(
        model=model,
        units=model.units,
        comm=comm,
        optimizer_cls=optimizer_cls,
        param_groups=partial(_param_groups, config, model.blocks),
        optimizer_kwargs=optimizer_kwargs,
        init=(InitialValues(model) if draw else loaded_later) if from_meta else None,
        device=device,
        reshard_after_forward=config.reshard_after_forward,
        ema_decay=config.ema_decay or None,
        secondary_shard_size=config.node_copy or None,
        **engine_settings(config, strategy_entry(config.strategy).stage, comm.world_size, len(model.units)),
    )
    return model, build_strategy(config.strategy, setup)


def _param_groups(config: TrainConfig, blocks: nn.ModuleList, module: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's param groups for ``module``, which contains ``blocks`` and may be the model in a wrapper."""
    if config.optimizer != "muon":
        return decay_groups(module.named_parameters(), config.weight_decay)
    wanted = {id(block) for block in blocks}
    names = [name for name, each in module.named_modules() if id(each) in wanted]
    return muon_groups(module.named_parameters(), config.weight_decay, names)


def local_steps(given: LocalStepsConfig, num_units: int) -> LocalSteps | None:
    """Return how replicas take local and outer steps; None if all ranks take each step together.

    Raises:
        UserError: there are more fragments than units, which are ``num_units`` and the root.
    """
    if not given.on:
        return None
    if given.fragments > num_units + 1:
        what = f"{given.fragments} are more than the {num_units + 1} units of the model"
        raise UserError("local_steps.fragments", what, f"give at most {num_units + 1}")
    wire = None if given.wire == "float32" else DTYPES.get(given.wire, given.wire)
    return LocalSteps(
        every=given.every,
        outer_lr=given.outer_lr,
        outer_momentum=given.outer_momentum,
        fragments=given.fragments,
        wire=wire,
    )


def engine_settings(config: TrainConfig, stage: int, world_size: int, num_units: int) -> dict[str, Any]:
    """What the engine is asked for at a stage, for a model of ``num_units`` units: fields of `Setup` and of a `Job`."""
    shards = STAGES[stage].params is SHARD and (config.ranks_that_shard(world_size) > 1 or world_size == 1)
    how = {"shards_weights": shards, "exact_sums": config.has_exact_sums}
    return {
        **config.as_asked,
        "compute_dtype": DTYPES[config.dtype],
        "reduce_dtype": DTYPES.get(config.reduce_dtype),  # None: that of the master weights
        "wire": {**config.wire.as_precision(DTYPES), "rounding_seed": config.seed},
        "local_steps": local_steps(config.local_steps, num_units),
        "offload": offload_of(config.offload, Path(config.out), **how),
    }


def offload_of(given: OffloadConfig, out: Path, **how: bool) -> Offload | None:
    """Which state leaves the device; ``out``: the run folder, ``how``: as `OffloadConfig.places` takes it."""
    if not given.on:
        return None
    places = given.places(**how)
    return Offload(**places, fraction=given.share, pinned=given.pinned_bytes, path=given.folder(out))


def _optimizer(config: TrainConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer's class and arguments."""
    kwargs: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.optim.eps}
    if config.optimizer == "muon":
        return MuonAdamW, {**kwargs, "momentum": config.momentum, "fused": config.fused}
    if config.optimizer in IN_8_BITS:
        return {"adamw8bit": AdamW8bit, "flash-adamw": FlashAdamW}[config.optimizer], kwargs
    kept = {} if config.state_format == "fp32" else {"state_format": config.state_format}  # an argument of `Zero`
    return torch.optim.AdamW, {**kwargs, "fused": config.fused, **kept}


def serving(config: TrainConfig, model: LanguageModel, device: torch.device) -> dict[str, str]:
    """The implementation (Triton, PyTorch, torch.compile) that serves each operation of this run, by operation."""
    served: dict[str, str] = {**describe(device, config.kernels, model.operations)}
    if config.compile == "on":
        fused = (name for name in model.operations if left_to_compiler(name, config.kernels))
        served |= {OPERATIONS[name].name: "torch.compile" for name in fused}
    if config.optimizer in IN_8_BITS:
        in_a_loop = device.type == "cpu" and config.kernels == "auto" and in_one_pass("cpu")
        adamw = {"AdamW8bit": "C++ loop"} if in_a_loop else describe(device, config.kernels, ["adamw8bit"])
    else:
        adamw = {"AdamW": "torch fused" if config.fused else "torch"}
    return {**served, **({"Muon": "torch"} if config.optimizer == "muon" else {}), **adamw}
