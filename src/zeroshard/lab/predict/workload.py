"""The training job of a plan: a model, its micro-batches and its optimizer. Each micro-batch size is traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from zeroshard.errors import UserError
from zeroshard.kernels import Choice
from zeroshard.lab.predict.buffers import Buffer, buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, OptimizerState
from zeroshard.lab.predict.model_spans import Trace
from zeroshard.lab.predict.model_trace import Inputs, tokens_and_targets, trace_language_model, trace_model
from zeroshard.models import LanguageModel, build_model
from zeroshard.models.adapters import Lora
from zeroshard.models.presets import model_config, nearest_preset
from zeroshard.train.config.validate import nearest
from zeroshard.zero import MixedPrecision
from zeroshard.zero.buffers.unit_choice import UnitChoice, choose_units

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WHOLE = {"Muon": "matrices", "Adafactor": "all"}  # optimizers that need tensors unsplit, and of which parameters


@dataclass
class Workload:
    """A model, how it computes, and its optimizer.

    Attributes:
        model: the model; its parameters need no values.
        name: the name that tables print.
        units: as `zeroshard.Zero` takes them.
        inputs: makes the arguments of a micro-batch.
        seq_len: tokens of a row; 1 if the model is no language model.
        precision: the dtype policy.
        optimizer: a key of `zeroshard.lab.predict.memory.OPTIMIZER_STATES`.
        kernels: the choice of kernels, as our models take it.
        ours: whether it is one of our language models, with tokens and targets as its arguments, and with the model's
            own units or its blocks as units.
        weights: the dtype of parameters that have no separate master weights; None: the model's own.
        autocast: the dtype that `torch.autocast` casts to in forward; None: it is not used.
    """

    model: nn.Module
    name: str
    units: list[nn.Module] | None
    inputs: Inputs
    seq_len: int
    precision: MixedPrecision
    optimizer: str = "AdamW"
    kernels: Choice = "auto"
    ours: bool = False
    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None
    _traces: dict[tuple[int, str], Trace] = field(default_factory=dict)
    _buffers: dict[tuple[int, bool, int, MixedPrecision], list[Buffer]] = field(default_factory=dict)

    @property
    def num_params(self) -> int:
        """Number of elements of all parameters; a shared one counts once."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def num_trained_params(self) -> int:
        """Number of elements of the parameters that take gradients; a shared one counts once."""
        return sum(param.numel() for param in self.model.parameters() if param.requires_grad)

    @property
    def num_flops_per_token(self) -> int:
        """FLOPs of forward and backward without recomputation; 6 per trained parameter if the model is not ours."""
        if isinstance(self.model, LanguageModel):
            return self.model.num_flops_per_token(self.seq_len)
        return 6 * sum(param.numel() for param in self.model.parameters() if param.requires_grad)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; 0 if the model is no language model."""
        return getattr(getattr(self.model, "config", None), "vocab_size", 0)

    @property
    def dtype(self) -> str:
        """Name of the dtype that the model computes in."""
        dtype = next((self.precision.compute_dtype(param.dtype) for param in self.model.parameters()), torch.float32)
        return str(self.weights or self.autocast or dtype).removeprefix("torch.")

    @property
    def states(self) -> tuple[OptimizerState, OptimizerState | None]:
        """The states of the optimizer, and of a second one for unsplit tensors or None: AdamW and Muon, say."""
        found = OPTIMIZER_STATES[self.optimizer]
        return (OPTIMIZER_STATES["AdamW"], found) if self.optimizer in WHOLE else (found, None)

    @property
    def num_bytes_of_states(self) -> float:
        """Bytes of weights, master weights, gradients and states per parameter, unsharded: 16 with bf16 and AdamW."""
        dtype = self.weights or next(iter(self.model.parameters())).dtype
        compute, reduce = self.precision.compute_dtype(dtype), self.precision.gradient_dtype(dtype)
        master = dtype.itemsize if compute != dtype else 0
        return compute.itemsize + master + reduce.itemsize + self.states[0].num_per_element * dtype.itemsize

    def unread_bytes(self, micro_batch: int) -> int:
        """Bytes of a micro-batch's activations that selective recomputation keeps although backward does not read them.

        They are the output of each block's last product. ``selective:2`` keeps it only if its number in the block is
        odd, as in LLaMA.
        """
        config: Any = getattr(self.model, "config", None)
        kept = getattr(config, "activation_checkpointing", "none")
        keeps_last = isinstance(self.model, LanguageModel) and len(self.model.products_of_a_block) % 2 == 1
        if kept != "selective" and not (kept == "selective:2" and keeps_last):
            return 0
        itemsize = getattr(torch, self.dtype).itemsize
        return micro_batch * self.seq_len * config.n_embd * itemsize * config.n_layer

    def trace(self, micro_batch: int, device_type: str = "cpu") -> Trace:
        """The trace of one micro-batch."""
        as_on = "eager" if self.kernels == "reference" and device_type == "cuda" else device_type
        key = (micro_batch, as_on)
        if key not in self._traces:
            precision = self.precision if self.weights is None else MixedPrecision(param_dtype=self.weights)
            how: dict[str, Any] = {"device_type": as_on, "autocast": self.autocast}
            if isinstance(self.model, LanguageModel) and self.ours:
                how |= {"blocks_alone": self.units != self.model.units}
                self._traces[key] = trace_language_model(self.model, micro_batch, self.seq_len, precision, **how)
            else:
                self._traces[key] = trace_model(self.model, micro_batch, self.units, self.inputs, precision, **how)
        return self._traces[key]

    def buffers(self, num_shards: int, *, replicated: bool = False, leaves: int = 0) -> list[Buffer]:
        """The flat buffers as an engine lays them out over ``num_shards`` ranks.

        ``replicated``: whether there are several such groups of ranks. ``leaves``: as `Zero` takes them; 0: None.
        """
        key = num_shards, replicated, leaves, self.precision
        if key not in self._buffers:
            whole: Iterable[nn.Parameter] = ()
            if self.optimizer in WHOLE:
                inside = self.model.blocks if isinstance(self.model, LanguageModel) else self.units or []
                params = [p for unit in inside for p in unit.parameters() if p.dim() == 2]
                whole = params if WHOLE[self.optimizer] == "matrices" else self.model.parameters()
            how: dict[str, Any] = {"whole": whole, "replicated": replicated, "precision": self.precision}
            how["leaves"] = leaves or None
            found, kept = buffers_of(self.model, num_shards, self.units, **how), self.weights
            self._buffers[key] = found if kept is None else [replace(each, dtype=kept) for each in found]
        return self._buffers[key]

    def changed(
        self,
        overrides: Mapping[str, object] = MappingProxyType({}),
        *,
        seq_len: int | None = None,
        lora: Lora | None = None,
    ) -> Workload:
        """A copy with other fields of the model's configuration, another sequence length or adapters.

        Only for our models.

        Raises:
            UserError: the values contradict each other.
        """
        assert isinstance(self.model, LanguageModel)
        name, changes = nearest_preset(cast("Any", self.model.config))
        return language_model(
            name,
            overrides={**changes, **overrides},
            seq_len=self.seq_len if seq_len is None else seq_len,
            precision=self.precision,
            optimizer=self.optimizer,
            kernels=self.kernels,
            document_mask=self.model.eos_id is not None,
            lora=self.model.lora if lora is None else lora,
            label=self.name,
            weights=self.weights,
            autocast=self.autocast,
        )


def language_model(
    name: str,
    *,
    overrides: Mapping[str, object] = MappingProxyType({}),
    seq_len: int | None = None,
    precision: MixedPrecision,
    optimizer: str = "AdamW",
    kernels: Choice = "auto",
    document_mask: bool = False,
    lora: Lora | None = None,
    label: str = "",
    weights: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> Workload:
    """The workload of a preset with some fields changed; ``seq_len`` None: the longest that the preset is made for.

    ``document_mask``: whether attention stays inside a document. ``lora``: the adapters; with them, nothing else is
    trained. ``weights``, ``autocast``: as in `Workload`.

    Raises:
        UserError: there is no such preset or field, or the values contradict each other.
    """
    config = model_config(name, overrides=overrides)
    length = config.seq_len if seq_len is None else seq_len
    if length > config.seq_len and name.startswith("llama"):  # LLaMA has no learned position table
        config = model_config(name, overrides={**overrides, "seq_len": length})
    with torch.device("meta"):
        model = build_model(name, overrides={**overrides, "seq_len": config.seq_len}, kernels=kernels, lora=lora)
    model.eos_id = 0 if document_mask else None
    model.check_seq_len(length)
    return Workload(
        model,
        label or name,
        model.units,
        tokens_and_targets(length),
        length,
        precision,
        known_optimizer(optimizer),
        kernels,
        ours=True,
        weights=weights,
        autocast=autocast,
    )


def workload_of(
    model: str | nn.Module,
    *,
    seq_len: int | None,
    precision: MixedPrecision,
    optimizer: str,
    kernels: Choice,
    document_mask: bool = False,
    lora: Lora | None = None,
    units: UnitChoice | None,
    inputs: Callable[[int], tuple[Any, ...]] | None,
    overrides: Mapping[str, object] = MappingProxyType({}),
    weights: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> Workload:
    """Make a workload from the arguments of `zeroshard.lab.plan`; errors as there."""
    if isinstance(model, str):
        return language_model(
            model,
            overrides=overrides,
            seq_len=seq_len,
            precision=precision,
            optimizer=optimizer,
            kernels=kernels,
            document_mask=document_mask,
            lora=lora,
            weights=weights,
            autocast=autocast,
        )
    _require_trainable(model)
    changes = {"master_weights": weights, "document_mask": document_mask, "lora": lora, "overrides": overrides}
    for change, asked in changes.items():
        if asked:
            raise UserError(change, "it changes presets only, and a module is given", _INSTEAD[change])
    chosen = None if units is None else choose_units(model, units)
    name, optimizer = type(model).__name__, known_optimizer(optimizer)
    if isinstance(model, LanguageModel):
        seq_len = model.config.seq_len if seq_len is None else seq_len
        model.check_seq_len(seq_len)
        chosen = model.units if chosen is None else chosen
        ours = inputs is None and chosen in (model.units, list(model.blocks))
        inputs, kernels = inputs or tokens_and_targets(seq_len), model.kernels
    elif inputs is None:
        what = f"a {name} is no language model of ours"
        raise UserError("inputs", what, "give inputs=lambda rows: (tensor, ...), the arguments of one micro-batch")
    else:
        seq_len, ours = seq_len or 1, False
    return Workload(model, name, chosen, inputs, seq_len, precision, optimizer, kernels, ours=ours, autocast=autocast)


_INSTEAD = {  # settings that change presets only: what to do instead if the user gives a module
    "master_weights": "give it to plan in the dtype of its weights",
    "document_mask": "set its eos_id, or give a preset's name",
    "lora": "give it adapters with peft, or give a preset's name",
    "overrides": "build it so, or give a preset's name",
}


def _require_trainable(model: object) -> None:
    if not isinstance(model, nn.Module):
        what = f"{model!r} is a {type(model).__name__} and no nn.Module"
        raise UserError("model", what, "give a module, or a preset's name")
    if not any(param.requires_grad for param in model.parameters()):
        raise UserError("model", f"{type(model).__name__} has no parameters to train", "give a module that has some")


def known_optimizer(name: str) -> str:
    """The key of `zeroshard.lab.predict.memory.OPTIMIZER_STATES` for a name in any spelling.

    Raises:
        UserError: no optimizer has this name.
    """
    spellings = {_plain(key): key for key in OPTIMIZER_STATES}
    if _plain(name) not in spellings:
        todo = nearest(name, OPTIMIZER_STATES, f"choose one of {', '.join(OPTIMIZER_STATES)}")
        raise UserError("optimizer", f"nothing is known of {name!r}", todo)
    return spellings[_plain(name)]


def _plain(name: str) -> str:
    return name.lower().replace("with", "").replace("-", "").replace("_", "").replace(" ", "")
