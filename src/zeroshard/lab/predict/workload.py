"""The training job of a plan: a model, its micro-batches and its optimizer. Each micro-batch size is traced once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import nn

from zeroshard.host.errors import UserError
from zeroshard.kernels import Choice
from zeroshard.lab.predict.actions import Step
from zeroshard.lab.predict.buffers import Buffer, buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, OptimizerState
from zeroshard.lab.predict.model_spans import Trace
from zeroshard.lab.predict.model_trace import (
    Inputs,
    is_as_built,
    tokens_and_targets,
    trace_language_model,
    trace_model,
)
from zeroshard.models import LanguageModel, build_model
from zeroshard.models.adapters import Lora
from zeroshard.models.plain_module import PlainModule, described
from zeroshard.models.presets import model_config, nearest_preset
from zeroshard.settings.validate import nearest
from zeroshard.zero import STAGES, FrozenFormat, MixedPrecision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WHOLE = {
    "Muon": "matrices",
    "Adafactor": "all",
}  # optimizers that need tensors unsplit, and of which parameters


@dataclass
class Workload:
    """A model, how it computes, and its optimizer.

    Attributes:
        model: the model; its parameters need no values.
        name: the name that tables print.
        units: as `zeroshard.Zero` takes them.
        inputs: makes the arguments of a micro-batch.
        seq_len: tokens of a row; 1 if the model is no language model.
        sequence_parallel: ranks that share each row, a rank with a part of its tokens; 1: a rank has whole rows.
        precision: the dtype policy.
        optimizer: a key of `zeroshard.lab.predict.memory.OPTIMIZER_STATES`.
        kernels: the choice of kernels, as our models take it.
        ours: whether it is one of our language models, with tokens and targets as its arguments, and with the model's
            own units or its blocks as units.
        autocast: the dtype that `torch.autocast` casts to in forward; None: it is not used.
        frozen_format: in which frozen weights are kept, as `zeroshard.Zero` takes it; None: as they are computed with.
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
    autocast: torch.dtype | None = None
    sequence_parallel: int = 1
    frozen_format: FrozenFormat | None = None
    # steps that were predicted, by what they depend on besides: plans of one question differ in device and links only
    steps: dict[tuple[Any, ...], Step] = field(default_factory=dict)
    # bytes of weights and states that stay on the device, by what they depend on besides
    held: dict[tuple[Any, ...], int] = field(default_factory=dict, repr=False)
    _traces: dict[tuple[int, str, bool], Trace] = field(default_factory=dict)
    _buffers: dict[tuple[int, bool, int | None, MixedPrecision], list[Buffer]] = field(default_factory=dict)
    _changed: dict[tuple[Any, ...], Workload] = field(default_factory=dict, repr=False)  # by what was changed

    @property
    def num_params(self) -> int:
        """Number of elements of all parameters; a shared one counts once."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def num_trained_params(self) -> int:
        """Number of elements of the parameters that take gradients; a shared one counts once."""
        return sum(param.numel() for param in self.model.parameters() if param.requires_grad)

    @property
    def codes(self) -> tuple[int, int]:
        """Number of elements of the frozen weights that are kept as codes, and bytes of these; 0, 0 if none are."""
        if self.frozen_format is None:
            return 0, 0
        found = [(each.layout.numel, codes.num_bytes) for each in self.buffers(1) if (codes := each.codes(STAGES[0]))]
        return sum(numel for numel, _ in found), sum(num_bytes for _, num_bytes in found)

    @property
    def num_flops_per_token(self) -> int:
        """FLOPs of forward and backward without recomputation; 6 per trained parameter if the model is not ours."""
        return self.described.num_flops_per_token(self.seq_len)

    @property
    def described(self) -> LanguageModel | PlainModule:
        """What answers for the model."""
        return described(self.model)

    @property
    def tokens_of_rank(self) -> int:
        """Tokens of a row that a rank has."""
        return self.seq_len // self.sequence_parallel

    def groups(self, world_size: int) -> tuple[int, str]:
        """How many groups of ranks there are that share rows, of ``world_size``; and these GPUs in words."""
        number, size = world_size // self.sequence_parallel, self.sequence_parallel
        return number, f"{number} GPUs" if size == 1 else f"{number} groups of {size} GPUs"

    @property
    def vocab_size(self) -> int:
        """Number of token ids; 0 if the model is no language model."""
        return getattr(getattr(self.model, "config", None), "vocab_size", 0)

    @property
    def dtype(self) -> str:
        """Name of the dtype that the model computes in."""
        dtype = next((self.precision.compute_dtype(param.dtype) for param in self.model.parameters()), torch.float32)
        return str(self.autocast or dtype).removeprefix("torch.")

    @property
    def states(self) -> tuple[OptimizerState, OptimizerState | None]:
        """The states of the optimizer, and of a second one for unsplit tensors or None: AdamW and Muon, say."""
        found = OPTIMIZER_STATES[self.optimizer]
        beside = OPTIMIZER_STATES["AdamW8bit" if found.block > 1 else "AdamW"]
        return (beside, found) if self.optimizer in WHOLE else (found, None)

    @property
    def num_bytes_of_states(self) -> float:
        """Bytes of weights, master weights, gradients and states per parameter, unsharded: 16 with bf16 and AdamW."""
        dtype = next(iter(self.model.parameters())).dtype
        compute, reduce = self.precision.compute_dtype(dtype), self.precision.gradient_dtype(dtype)
        master = dtype.itemsize if compute != dtype else 0
        return compute.itemsize + master + reduce.itemsize + self.states[0].bytes_per_element(dtype.itemsize)

    def unread_bytes(self, micro_batch: int) -> int:
        """Bytes of a micro-batch's activations that are kept although backward does not read them."""
        itemsize = getattr(torch, self.dtype).itemsize
        return micro_batch * self.tokens_of_rank * self.described.num_unread_per_token * itemsize

    def host_input_bytes(self, micro_batch: int) -> int:
        """Bytes of a rank's host in which inputs of blocks wait for backward; 0 unless they are offloaded."""
        itemsize = getattr(torch, self.dtype).itemsize
        return self.described.offloaded_input_bytes(micro_batch * self.tokens_of_rank, itemsize)

    def trace(
        self,
        micro_batch: int,
        device_type: str = "cpu",
        *,
        compiled: Literal["", "compiled", "in pieces"] = "",
        deterministic: bool = False,
    ) -> Trace:
        """The trace of one micro-batch.

        ``compiled``: whether torch.compile compiles the model for a GPU, and how; ``deterministic``: whether
        algorithms are, as those of reproducible steps.
        """
        as_on = "eager" if self.kernels == "reference" and device_type == "cuda" else device_type
        as_on = compiled or as_on
        key = (micro_batch, as_on, deterministic)
        if key not in self._traces:
            model, precision = self.model, self.precision
            how: dict[str, Any] = {"device_type": as_on, "autocast": self.autocast}
            how |= {"sequence_parallel": self.sequence_parallel, "deterministic": deterministic}
            if self.ours:
                ours = cast("LanguageModel", model)
                how["blocks_alone"] = self.units != ours.units
                self._traces[key] = trace_language_model(ours, micro_batch, self.seq_len, precision, **how)
            else:
                self._traces[key] = trace_model(model, micro_batch, self.units, self.inputs, precision, **how)
        return self._traces[key]

    def buffers(self, num_shards: int, *, replicated: bool = False, reproducible: int | None = None) -> list[Buffer]:
        """The flat buffers as an engine lays them out over ``num_shards`` ranks.

        ``replicated``: whether there are several such groups of ranks. ``reproducible``: as `Zero` takes it.
        """
        key = num_shards, replicated, reproducible, self.precision
        if key not in self._buffers:
            whole: Iterable[nn.Parameter] = ()
            if self.optimizer in WHOLE:
                inside = self.described.blocks or self.units or []
                params = [p for unit in inside for p in unit.parameters() if p.dim() == 2]
                whole = params if WHOLE[self.optimizer] == "matrices" else self.model.parameters()
            how: dict[str, Any] = {"whole": whole, "replicated": replicated, "reproducible": reproducible}
            how |= {"block": self.states[0].block, "frozen_format": self.frozen_format}
            self._buffers[key] = buffers_of(self.model, num_shards, self.units, precision=self.precision, **how)
        return self._buffers[key]

    def changed(
        self,
        overrides: Mapping[str, object] = MappingProxyType({}),
        *,
        seq_len: int | None = None,
        lora: Lora | None = None,
        frozen_format: FrozenFormat | None = None,
    ) -> Workload:
        """A copy with other fields of the model's configuration, sequence length, adapters or format of frozen weights.

        Only for our models.

        Raises:
            UserError: the values contradict each other.
        """
        known = self.described
        name, changes = nearest_preset(known.config)
        how: dict[str, Any] = {
            "seq_len": seq_len or self.seq_len,
            "kernels": self.kernels,
            "document_mask": known.eos_id is not None,
            "lora": known.lora if lora is None else lora,
            "narrow": OPTIMIZER_STATES[self.optimizer].corrects,
        }
        form = frozen_format or self.frozen_format
        of_rank = self.precision, self.sequence_parallel, self.autocast, form
        key = name, *sorted({**changes, **overrides}.items()), *how.values(), known.matmul, of_rank
        if key not in self._changed:
            given = {**changes, **overrides}
            found = None
            if self.ours and overrides.keys() <= {"activation_checkpointing", "tiles"}:
                found = preset_like(self.model, name, given, **how)
            model, length = found or preset(name, given, **how)
            model.matmul = known.matmul
            rows = tokens_and_targets(length // self.sequence_parallel)
            own: dict[str, Any] = {"steps": {}, "_traces": {}, "_buffers": {}, "held": {}, "frozen_format": form}
            if form == self.frozen_format and next(model.parameters()) is next(self.model.parameters()):
                own |= {"_buffers": self._buffers, "held": self.held}  # these are the same, too
            self._changed[key] = replace(self, model=model, units=model.units, inputs=rows, seq_len=length, **own)
        return self._changed[key]


def preset(
    name: str,
    overrides: Mapping[str, object],
    *,
    seq_len: int | None,
    kernels: Choice,
    document_mask: bool,
    lora: Lora | None,
    narrow: bool = False,
) -> tuple[LanguageModel, int]:
    """The model of a preset with some fields changed, without values, and the tokens of its rows.

    Args:
        name, overrides, kernels: as `zeroshard.models.build_model` takes them.
        seq_len: tokens of a row; None: the longest that the preset is made for.
        document_mask: whether attention stays inside a document.
        lora: the adapters; with them, nothing else is trained.
        narrow: whether weights are in bfloat16, for an optimizer that needs no wider ones.

    Raises:
        UserError: there is no such preset or field, or the values contradict each other.
    """
    config = model_config(name, overrides=overrides)
    length = config.seq_len if seq_len is None else seq_len
    if length > config.seq_len and name.startswith("llama"):  # LLaMA has no learned position table
        config = model_config(name, overrides={**overrides, "seq_len": length})
    with torch.device("meta"):
        changes = {**overrides, "seq_len": config.seq_len}
        model = build_model(name, overrides=changes, kernels=kernels, lora=lora, for_plan=True)
    for param in model.parameters() if narrow else ():
        param.data = param.data.to(torch.bfloat16)
    model.eos_id = 0 if document_mask else None
    model.check_seq_len(length)
    return model, length


FEW = 4  # blocks of a model that is built to see whether settings go together


def preset_like(
    model: nn.Module, name: str, overrides: Mapping[str, object], **how: Any
) -> tuple[LanguageModel, int] | None:
    """As `preset`, for overrides that change no parameter of ``model``, whose modules the result has.

    So nothing of it may run; what is traced is built anew. None: ``model`` is another one than a preset's.
    """
    known, config = cast("LanguageModel", model), cast("Any", model_config(name, overrides=overrides))
    few, length = preset(name, {**overrides, "n_layer": min(FEW, config.n_layer)}, **how)
    facts = [(type(each), each.lora, each.kernels, next(each.parameters()).dtype) for each in (known, few)]
    if facts[0] != facts[1] or not is_as_built(known):
        return None
    found: Any = copy.copy(known)
    found._config = config if config.seq_len == few.config.seq_len else replace(config, seq_len=few.config.seq_len)
    found.eos_id = few.eos_id
    return (found, length) if found.config is found._config else None


def known_optimizer(name: str, state_format: str = "fp32") -> str:
    """The key of `zeroshard.lab.predict.memory.OPTIMIZER_STATES` for a name in any spelling, and a format of states.

    Raises:
        UserError: no optimizer has this name, or it cannot keep its states in this format.
    """
    names = [key for key in OPTIMIZER_STATES if " in " not in key]
    spellings = {_plain(key): key for key in names}
    if _plain(name) not in spellings:
        todo = nearest(name, names, f"choose one of {', '.join(names)}")
        raise UserError("optimizer", f"nothing is known of {name!r}", todo)
    found = spellings[_plain(name)]
    if state_format == "fp32":
        return found
    if f"{found} in {state_format}" not in OPTIMIZER_STATES:
        todo = "leave it out, or use optimizer adamw"
        raise UserError("state_format", f"{found} cannot keep its states in {state_format}", todo)
    return f"{found} in {state_format}"


def _plain(name: str) -> str:
    return name.lower().replace("with", "").replace("-", "").replace("_", "").replace(" ", "")
