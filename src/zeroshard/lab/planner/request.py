"""The arguments of `plan` and `planner_for`: their types, defaults and checks, and the settings derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from zeroshard.host.errors import UserError
from zeroshard.kernels import Choice
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.hardware import LINKS, Calibration, Device, Link, find_device, find_link
from zeroshard.lab.predict.memory import OPTIMIZER_STATES
from zeroshard.lab.predict.model_trace import tokens_and_targets
from zeroshard.lab.predict.rates import SUSTAINED, Attention, Impl, Loss, Software, attention_of_torch
from zeroshard.lab.predict.workload import DTYPES, Workload, known_optimizer, preset
from zeroshard.models import LanguageModel
from zeroshard.models.adapters import Lora
from zeroshard.models.plain_module import described
from zeroshard.settings import rules
from zeroshard.settings.engine import EngineChoices
from zeroshard.settings.sizes import parse_size
from zeroshard.train.profiling.devices import FP8
from zeroshard.zero import MixedPrecision
from zeroshard.zero.frozen_formats.settings import frozen_format_of
from zeroshard.zero.unit_choice import UnitChoice, choose_units

HEADROOM = 0.02  # share of a device's memory that must stay free, for what the plan does not predict


@dataclass(frozen=True)
class Request(EngineChoices):
    """The keyword arguments of `plan` and `planner_for` besides the model.

    Attributes:
        world_size: number of ranks, one per GPU.
        gpu: a row of `zeroshard.lab.predict.hardware.DEVICES`, a file that `zeroshard bench device` wrote, or a
            `Device`.
        network: each GPU's link to other nodes: a bandwidth with its unit, a row of `LINKS`, or a `Link`.
        within_node: the link between a node's GPUs, in the same forms; None: the GPU's own, or the measured one.
        gpus_per_node: GPUs of a full node.
        host_memory: memory of a node's host, for what its ranks keep off their devices: a text such as ``512GiB``;
            None: that of the machine on which a file of `zeroshard bench device` was written, else unknown.
        node_copy: number of a node's ranks that share a second copy of stage 3's weights, the ``secondary_shard_size``
            of `zeroshard.Zero`; None: there is none. Stages with unsharded weights ignore it.
        global_batch: rows of a step over all ranks, by gradient accumulation; None: one micro-batch per rank.
        seq_len: tokens of a sequence; None: the longest that the model is made for.
        sequence_parallel: consecutive GPUs that share each sequence of one of our language models.
        dtype: dtype of forward and backward; master weights and states keep the model's.
        matmul: numbers that the blocks' linear layers multiply: ``dtype`` or ``fp8``, of one of our language models.
        reduce_dtype: dtype in which gradients are reduced; None: that of the master weights.
        wire: wire formats: the fields ``gather``, ``reduce``, ``block``, ... of `zeroshard.zero.MixedPrecision`; stage
            0 ignores them.
        optimizer: name of the optimizer, as in torch.
        state_format: how its states are kept between steps, as `zeroshard.Zero.optimizer` takes it.
        accumulate, prefetch, reshard_after_forward: as `zeroshard.Zero` takes them.
        kernels: the choice of kernels, as our models take it.
        impl: how a GPU computes: ``eager`` (operation by operation), ``compile`` or ``kernels`` (fused by hand); None:
            a preset as `zeroshard train` computes it by default, a module as ``kernels`` implies.
        attention: the fused attention kernel of a GPU: ``flash-1``, ``flash-2``, ``flash-3`` or ``cudnn``; None: the
            one that torch chooses there.
        loss: how a GPU computes the loss, as in `zeroshard.lab.predict.rates.Software`; None: as ``impl`` implies.
        document_mask: whether attention stays inside a document, in our models; this needs memory for a mask.
        lora: adapters to train instead of the weights, for a preset or a Hugging Face model by name.
        headroom: share of memory that must stay free for a row to fit.
        units: as `zeroshard.Zero` takes them; None: the trainer's units, or the model's blocks.
        inputs: for a module that is not one of our language models: maps rows to the arguments of one micro-batch.
        overrides: fields of the preset's configuration to change.
        reproducible: as `zeroshard.Zero` takes it.
        offload: which state leaves the device, as `zeroshard.Zero` takes it; None: none does. The fraction ``auto`` is
            what a step does not wait for, or more if a row does not fit otherwise.
        frozen_format: as `zeroshard.Zero` takes it.
        autocast: whether weights and gradients are fp32, and forward runs in ``dtype`` by `torch.autocast`.

    Raises:
        UserError: a value is invalid in any plan; the message names the argument.
        TypeError: there is no argument of this name.
    """

    world_size: int = 1
    gpu: str | Device | Calibration = "h100-80gb"
    network: str | Link = "400Gbit/s"
    within_node: str | Link | None = None
    gpus_per_node: int = 8
    host_memory: str | None = None
    node_copy: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    sequence_parallel: int = 1
    dtype: str = "bfloat16"
    matmul: str = "dtype"
    reduce_dtype: str | None = None
    wire: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    optimizer: str = "adamw"
    state_format: str = "fp32"
    reshard_after_forward: bool = True
    kernels: Choice = "auto"
    impl: Impl | None = None
    attention: Attention | None = None
    loss: Loss | None = None
    document_mask: bool = False
    lora: Lora | None = None
    headroom: float = HEADROOM
    units: UnitChoice | None = None
    inputs: Callable[[int], tuple[Any, ...]] | None = None
    overrides: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    autocast: bool = False

    def __post_init__(self) -> None:
        _require_count("gpus", self.world_size, 1)
        _require_count("gpus_per_node", self.gpus_per_node, 1)
        _require_count("global_batch", 1 if self.global_batch is None else self.global_batch, 1)
        _require_count("seq_len", 1 if self.seq_len is None else self.seq_len, 1)
        _require_count("prefetch", self.prefetch, 0)
        _require_count("sequence_parallel", self.sequence_parallel, 1)
        rules.check_sequence_parallel(self.sequence_parallel, self.world_size)
        if not 0 <= self.headroom < 1:
            raise UserError("headroom", f"{self.headroom} is no share of the memory", "give a number in [0, 1)")

    @property
    def calibration(self) -> Calibration:
        """The device, and its measured link if there is one."""
        if isinstance(self.gpu, Calibration):
            return self.gpu
        return Calibration(self.gpu) if isinstance(self.gpu, Device) else find_device(self.gpu)

    @property
    def host_memory_bytes(self) -> int | None:
        """``host_memory`` in bytes; None: nobody knows."""
        if self.host_memory is not None:
            return parse_size("host_memory", self.host_memory)
        return self.calibration.device.host_memory_bytes or None

    @property
    def as_a_run(self) -> bool:
        """Whether ``impl`` of a preset is what `zeroshard train` does by default on a GPU."""
        return self.impl is None and self.calibration.device.device_type == "cuda" and not self.autocast

    @property
    def left_uncompiled_with(self) -> str:
        """The setting for which a run does not compile by default; empty: it does."""
        recomputation = str(self.overrides.get("activation_checkpointing", "none"))
        tiles = str(self.overrides.get("tiles", "none"))
        return rules.left_uncompiled_with(self.reproducible, tiles, self.sequence_parallel, recomputation)

    @property
    def who_computes(self) -> Choice:
        """The choice of kernels: ``kernels``, or the reference if the model is computed operation by operation.

        A loss that is said to be computed apart from compiled code is planned like ours, and
        `zeroshard.lab.predict.process_memory` accounts for the difference.
        """
        if self.impl == "compile" and self.calibration.device.device_type == "cuda":
            return "auto" if self.kernels == "reference" and self.loss is not None else self.kernels
        by_operation = (self.impl == "eager" or self.autocast) and self.kernels == "auto"
        return "reference" if by_operation else self.kernels

    def software_of(self, model: nn.Module) -> Software:
        """The kernels that compute ``model`` on a GPU; fused ones are those of its blocks, if they use any."""
        impl = self.impl or uncompiled(model, self.who_computes)
        documents = self.document_mask or getattr(model, "eos_id", None) is not None
        in_documents = documents or self.overrides.get("attention") in _AS_FLASH_2
        how = {"deterministic": self.reproducible is not None, "in_documents": in_documents}
        chosen = attention_of_torch(self.calibration.device, self.dtype, **how)
        return Software(impl, self.attention or chosen, self.loss)

    def precision(self) -> tuple[MixedPrecision, torch.dtype | None]:
        """The engine's policy, and autocast's dtype (or None)."""
        for name, value in (("dtype", self.dtype), ("reduce_dtype", self.reduce_dtype)):
            if value is not None and value not in DTYPES:
                raise UserError(name, f"{value!r} is not a choice", f"choose one of {', '.join(DTYPES)}")
        if self.autocast and self.dtype == "float32":
            raise UserError("autocast", "float32 weights are their own masters", "choose dtype bfloat16 or float16")
        compute = DTYPES[self.dtype]
        narrow = None if compute == torch.float32 or self.autocast else compute
        reduce = None if self.reduce_dtype is None else DTYPES[self.reduce_dtype]
        return MixedPrecision(narrow, reduce, **self.wire), compute if self.autocast else None

    def workload(self, model: str | nn.Module) -> Workload:
        """The training job of ``model``, a preset's name or a module."""
        precision, autocast = self.precision()
        optimizer, share = known_optimizer(self.optimizer, self.state_format), self.sequence_parallel
        if isinstance(model, str):
            narrow = OPTIMIZER_STATES[optimizer].corrects
            if narrow and (self.autocast or self.dtype != "bfloat16"):
                what = f"{self.dtype}{' by autocast' * self.autocast}, and weights of {optimizer} are bfloat16"
                raise UserError("dtype", what, "use bfloat16, without autocast, or optimizer adamw8bit")
            how: dict[str, Any] = {"kernels": self.who_computes, "document_mask": self.document_mask, "narrow": narrow}
            built, seq_len = preset(model, self.overrides, seq_len=self.seq_len, lora=self.lora, **how)
            units, inputs = built.units, tokens_and_targets(seq_len // self.sequence_parallel)
            name, ours, kernels = model, True, self.who_computes
        else:
            _require_trainable(model)
            for change, todo in _INSTEAD.items():
                if getattr(self, change):
                    raise UserError(change, "it changes presets only, and a module is given", todo)
            built, name = model, type(model).__name__
            units, ours = None if self.units is None else choose_units(model, self.units), False
            kernels, inputs, seq_len = self.who_computes, self.inputs, self.seq_len or 1
            if described(model).config is not None:
                known = cast("LanguageModel", model)
                seq_len = self.seq_len or known.config.seq_len
                known.check_seq_len(seq_len)
                units = known.units if units is None else units
                ours = inputs is None and units in (known.units, list(known.blocks))
                inputs, kernels = inputs or tokens_and_targets(seq_len // self.sequence_parallel), known.kernels
            elif inputs is None:
                what = f"a {name} is no language model of ours"
                todo = "give inputs=lambda rows: (tensor, ...), the arguments of one micro-batch"
                raise UserError("inputs", what, todo)
        if self.matmul == "fp8":
            self._multiply_in_8_bits(built)
        if share > 1:
            _require_shared(built, share, seq_len)
        how = {"ours": ours, "autocast": autocast, "sequence_parallel": share}
        how["frozen_format"] = frozen_format_of(self.frozen_format)
        return Workload(built, name, units, inputs, seq_len, precision, optimizer, kernels, **how)

    def cluster(self, found: Calibration) -> Cluster:
        """The ranks and their links.

        The link within a node is the given one, else the measured one, else the GPU's own, else that between nodes.
        Only CUDA devices have NCCL's protocols for small messages between nodes.
        """
        given, device = self.within_node, found.device
        within = find_link(given, "within_node") if isinstance(given, str) else given
        within = within or found.link or (LINKS[device.link] if device.link else None)
        between = self.network if isinstance(self.network, Link) else find_link(self.network)
        if device.device_type != "cuda":
            between = replace(between, protocols=())
        return Cluster(self.world_size, self.gpus_per_node, within or between, between)

    def _multiply_in_8_bits(self, model: nn.Module) -> None:
        """Have ``model`` planned with products in 8 bits, or raise UserError."""
        device, why = self.calibration.device, ""
        if FP8 not in device.matmul_flops_per_s:
            why = f"no rate of products in 8 bits of {device.name} is known"
        elif self.dtype != "bfloat16" or self.autocast or self.lora is not None or "tiles" in self.overrides:
            why = "fp8 multiplies for bfloat16, without autocast, adapters and tiles"
        elif not described(model).layers_in_8_bits:
            why = f"a {type(model).__name__} has no blocks with linear layers whose sizes are multiples of 16"
        if why:
            raise UserError("matmul", why, "leave it out")
        cast("LanguageModel", model).matmul = "fp8"

    def check(self, workload: Workload, device: Device) -> None:
        """Raise UserError if the request is impossible for this workload on this device."""
        self._require_attention(device)
        if workload.dtype in DTYPES and workload.dtype not in device.matmul_flops_per_s:
            served = ", ".join(each for each in device.matmul_flops_per_s if each in DTYPES)
            raise UserError("dtype", f"{device.name} does not compute in {workload.dtype}", f"choose {served}")
        self._require_reproducible()
        if self.offload is not None and not workload.states[0].by_unit:
            what = f"{workload.optimizer} updates state on the host while the step waits, which no plan predicts"
            raise UserError("offload", what, "leave it out, or use optimizer adamw")
        number, groups = workload.groups(self.world_size)
        if self.global_batch and self.global_batch % number:
            what = f"{self.global_batch} sequences cannot be shared out to {groups}"
            raise UserError("global_batch", what, f"give a multiple of {number}")

    def _require_reproducible(self) -> None:
        """Raise UserError if the GPUs cannot share the micro-batches evenly, or something else rounds partial sums."""
        if self.reproducible is None:
            return
        rules.check_reproducible(self.reproducible, self.world_size)
        beside: dict[str, Any] = {"accumulate": self.accumulate, "sequence_parallel": self.sequence_parallel > 1}
        beside["tiles"] = self.overrides.get("tiles", "none") != "none"
        wire = "wire.weights" if self.wire.get("gather") else "wire.grads" if self.wire.get("reduce") else ""
        rules.check_same_bits(self.reproducible, wire=wire, **beside)

    def _require_attention(self, device: Device) -> None:
        """Raise UserError for an attention kernel without a known rate on ``device``: another's would be used."""
        known = SUSTAINED[device.sustained].attention if device.sustained else ("flash-2",)
        if self.attention and self.attention not in known:
            what = f"no rate of {self.attention} on {device.name} is known"
            raise UserError("attention", what, f"choose {' or '.join(known)}")


def uncompiled(model: nn.Module, kernels: Choice) -> Impl:
    """How a GPU computes ``model`` where nothing is compiled."""
    return "kernels" if described(model).has_fused_blocks and kernels != "reference" else "eager"


def _require_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(name, f"{value!r} is not a whole number of at least {least}", f"give {least} or more")


def _require_shared(model: nn.Module, sequence_parallel: int, seq_len: int) -> None:
    """Raise UserError if so many ranks cannot share the sequences of ``model``."""
    config = described(model).config
    if config is None:
        what = f"{sequence_parallel} GPUs share sequences, and a {type(model).__name__} is no language model of ours"
        raise UserError("sequence_parallel", what, "leave it out")
    rules.check_heads(sequence_parallel, config.n_head)
    rules.check_cut(seq_len, sequence_parallel)


_AS_FLASH_2 = "flash_attention_2", "flex_attention"  # of models of transformers, that are planned at its rate
_INSTEAD = {  # settings that change presets only: what to do instead if the user gives a module
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
