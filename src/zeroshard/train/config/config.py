"""`TrainConfig`, the settings of a training run: typed, and checked as soon as they are read.

Precedence: defaults < the TOML file of ``--config`` < flags. File and flags are merged into one nested dict of raw
values (`merge`), and `zeroshard.settings.validate` alone turns that dict into a configuration. So a value from the
file and one from a flag pass the same checks and get the same error messages. TOML has no null: 0 and "" mean "off" or
"the default", as each field's description says.

This module does not import torch, because the command line imports it before it knows whether it needs torch at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from zeroshard.comm.registry import COMMUNICATORS, comm_entry
from zeroshard.host.errors import UserError
from zeroshard.host.lazily import is_address
from zeroshard.models.config import check_tiles
from zeroshard.models.hugging_face.folder import is_hugging_face
from zeroshard.parallel.registry import STRATEGIES, strategies_with, strategy_entry
from zeroshard.settings import rules
from zeroshard.settings.base import SHORTHANDS, AutoSwitch, Fit, Fixed, Free, Names
from zeroshard.settings.engine import EngineConfig
from zeroshard.settings.frozen_base import check_base
from zeroshard.settings.optimizer import OptimizerName, check_optimizer
from zeroshard.settings.sizes import parse_nnodes
from zeroshard.settings.tables import ContractConfig, LinkConfig, OptimConfig, ProfileConfig, TrackConfig
from zeroshard.train.config.data_section import DataConfig
from zeroshard.train.config.model_section import ModelTables
from zeroshard.train.config.registered import CommName, StrategyName
from zeroshard.train.config.with_strategy import check_local_steps_settings, check_offload, check_wire

# Default rates for fine-tuning trained weights: Stanford Alpaca's, https://github.com/tatsu-lab/stanford_alpaca
FINE_TUNING: Mapping[str, float] = MappingProxyType({"lr": 2e-5, "min_lr": 2e-6})
# Default rate for training adapters: Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314, table 9
LORA_RATE = 2e-4
WARMUP_STEPS = 20  # the default
CompileBackend = Literal["inductor", "aot_eager", "eager"]


class RunTables(ModelTables):
    """Tables of a run that say nothing about the engine, and its strategy."""

    data: Free[DataConfig] = DataConfig()
    optim: OptimConfig = OptimConfig()
    profile: Free[ProfileConfig] = ProfileConfig()
    plan: Free[ContractConfig] = ContractConfig()
    link: Free[LinkConfig] = LinkConfig()
    track: TrackConfig = TrackConfig()

    strategy: Free[StrategyName] = Field(
        "zero2",
        description=f"How training state is spread over ranks: {', '.join(STRATEGIES)}, or module:name of your own.",
    )


class TrainConfig(EngineConfig, RunTables):
    """Settings of one training run. Validation fills in ``out`` if it is empty, so it is never empty afterwards."""

    comm: Free[CommName] = Field(
        "auto",
        description=f"Backend of collectives: auto (the fastest), {', '.join(COMMUNICATORS)}, or module:name of "
        "your own. torch: NCCL or gloo; ring, shm: our ring and shared memory.",
    )
    overlap: bool = Field(
        True,
        description="Overlap communication with computation; false: wait for each collective, to see the difference.",
    )
    nproc: Free[int] = Field(0, ge=0, description="Ranks to start on this machine; 0: torchrun's or SLURM's, else 1.")
    nnodes: Free[str] = Field(
        "1",
        description="Machines that start --nproc ranks each: N, or MIN:MAX to go on with fewer or more after a loss.",
    )
    rdzv_endpoint: Free[str] = Field("", description="HOST:PORT where several machines meet; HOST is one of them.")
    port: Free[int] = Field(0, ge=0, le=65535, description="Port where --nproc ranks meet; 0: any free.")
    max_restarts: Free[int] = Field(
        0, ge=0, description="Times that --nproc ranks are started again after one was lost, from the last checkpoint."
    )
    step_timeout_s: Free[float] = Field(
        600.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after which a step hangs: each rank's stacks go to OUT/stacks, the run ends. 0: never.",
    )
    device: Free[Literal["auto", "cpu", "cuda"]] = Field("auto", description="auto: GPUs where there are any.")

    seq_len: int = Field(128, ge=1, description="Tokens in a sequence.")
    micro_batch_size: Free[int] = Field(8, ge=1, description="Sequences per rank in one forward pass.")
    grad_accum_steps: Free[int] = Field(1, ge=1, description="Forward passes per optimizer step.")
    global_batch_size: Free[int] = Field(
        0, ge=0, description="Sequences per optimizer step over all ranks; sets grad_accum_steps. 0: follows from them."
    )
    max_steps: int = Field(500, ge=1, description="Optimizer steps in the whole run.")

    optimizer: Fixed[OptimizerName] = Field(
        "adamw",
        description="Update rule. adamw8bit: AdamW with states of 8 bits, 10 bytes a parameter in place of 16. "
        "flash-adamw: the same with weights in bfloat16 and 8 further bits of each, 7 bytes. muon: of the blocks' "
        "matrices, and AdamW for the rest.",
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="muon: decay of the mean gradient.")
    fused: Free[bool] = Field(True, description="The optimizer's fused kernel.")
    lr: float = Field(
        1e-3,
        gt=0,
        allow_inf_nan=False,
        description="Peak learning rate; not given and training from weights (hf: or init_from): 2e-5, for adapters "
        "2e-4.",
    )
    min_lr: float = Field(
        1e-4, ge=0, allow_inf_nan=False, description="Learning rate at the end of its decay; not given: a tenth of lr."
    )
    warmup_steps: int = Field(
        WARMUP_STEPS, ge=0, description="Steps of linear warm-up; a tenth of a run that is shorter than the default."
    )
    decay_steps: int = Field(
        0, ge=0, description="Steps until the learning rate has come down to min_lr, warm-up included; 0: max_steps."
    )
    weight_decay: float = Field(
        0.1,
        ge=0,
        allow_inf_nan=False,
        description="Weight decay of tensors with two or more dimensions; others have none.",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean gradient.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the mean squared gradient.")
    grad_clip: float = Field(1.0, ge=0, allow_inf_nan=False, description="Largest global norm; 0: off.")

    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="Decay of a moving average of the weights, evaluated too; 0: none."
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Compute type; the master weights are float32. float16 scales the loss. auto: bfloat16 on a GPU "
        "that has it, else float32.",
    )
    tf32: bool = Field(
        False, description="Matrix products of float32 in TF32, on GPUs that have it: faster, and 10 bits of mantissa."
    )
    loss_scale: float = Field(65536.0, gt=0, allow_inf_nan=False, description="float16: initial loss scale.")
    loss_scale_interval: int = Field(
        2000, ge=1, description="float16: steps without an overflow that double the scale; an overflow halves it."
    )
    compile: Free[AutoSwitch] = Field(
        "auto",
        description="torch.compile the model: in one graph on one rank, in pieces where ranks communicate. auto: on a "
        "GPU that has a compiler, but not with reproducible or tiles.",
    )
    compile_backend: Free[CompileBackend] = Field(
        "inductor", description="inductor: generated kernels. aot_eager, eager: the same graphs, run as they are."
    )
    seed: int = Field(0, ge=0, description="Seed of weights, order of data, dropout.")

    eval_interval: Free[int] = Field(100, ge=0, description="Steps between evaluations; 0: only at the end.")
    eval_rows: Free[int] = Field(
        160, ge=0, description="Sequences in an evaluation, whatever micro-batch and ranks are."
    )
    eval_batches: Free[int] = Field(
        0, ge=0, description="In place of eval_rows, that many times micro_batch_size; 0: none."
    )
    log_interval: Free[int] = Field(10, ge=1, description="Steps between console lines.")
    checkpoint_interval: Free[int] = Field(
        -1, ge=-1, description="Steps between saves; 0: at the end; -1: as eval_interval."
    )
    checkpoint_async: Free[bool] = Field(
        True,
        description="Write checkpoints while training continues, copying what steps change meanwhile; false, and "
        "with --offload disk: training waits.",
    )
    keep_checkpoints: Free[int] = Field(
        -1, ge=-1, description="Newest to keep; 0: all; -1: 2, or all at a set interval."
    )
    keep_every: Free[int] = Field(
        0, ge=0, description="Steps whose multiples keep their checkpoints beside the newest."
    )
    keep_best: Free[bool] = Field(
        False, description="Keep the checkpoint of the lowest validation loss too, as checkpoints/best."
    )
    callback: Names = Field(
        (), description="Classes of your own that take part in the run, each as module:Class; none: ours alone."
    )
    out: Free[str] = Field("", description="Run folder; empty: runs/MODEL-DATA-STRATEGY.")
    init_from: Free[str] = Field(
        "",
        description="Run, checkpoint, Hugging Face folder or hf:OWNER/NAME whose weights this run begins with, at its "
        "own step 0; empty: drawn.",
    )
    fit: Free[Fit] = Field(
        "off",
        description="Pull the levers of `zeroshard plan --fit` until the run fits into this machine's memory; what is "
        "given stays. base, states: these may have fewer bits, if nothing else is enough.",
    )
    dry_run: Free[bool] = Field(False, description="With fit: print what it chooses and its plan, and train nothing.")
    resume: Free[str] = Field(
        "none", min_length=1, description="none, auto (the newest valid in out), or a checkpoint."
    )

    @model_validator(mode="after")
    def _callbacks_are_addresses(self) -> Self:
        for name in self.callback:
            if not is_address(name):
                raise UserError("callback", f"{name!r} names no class", "write module:Class")
        if len(set(self.callback)) < len(self.callback):
            raise UserError("callback", "one of them is given twice", "name it once")
        return self

    @model_validator(mode="after")
    def _machines_know_where(self) -> Self:
        if parse_nnodes(self.nnodes)[1] > 1 and not self.rdzv_endpoint:
            raise UserError("rdzv_endpoint", f"is empty for nnodes = {self.nnodes}", "give HOST:PORT of one machine")
        return self

    @model_validator(mode="after")
    def _every_world_can_share_out(self) -> Self:
        """Check every world size that ``nnodes`` (MIN:MAX) allows: an elastic run may lose or gain machines."""
        least, most = parse_nnodes(self.nnodes)
        for world in (nodes * max(1, self.nproc) for nodes in range(least, most + 1) if most > 1):
            self.check_world(world)
            groups = self.num_groups(world)
            if self.global_batch_size % (self.micro_batch_size * groups):
                named = "ranks" if self.sequence_parallel == 1 else f"groups of {self.sequence_parallel} ranks"
                what = (
                    f"{self.global_batch_size} is no multiple of {self.micro_batch_size} (micro_batch_size) x {groups}"
                )
                todo = "change one of them, nproc or nnodes"
                raise UserError("global_batch_size", f"{what} {named}, which nnodes = {self.nnodes} allows", todo)
        return self

    @property
    def part_of_sequence(self) -> int:
        """The tokens of a sequence that one rank has, of those that share it."""
        return self.seq_len // self.sequence_parallel

    @property
    def from_weights(self) -> bool:
        """Whether training starts from weights of files, and not from drawn ones."""
        return bool(self.init_from) or (is_hugging_face(self.model.name) and not self.model.from_config)

    @model_validator(mode="after")
    def _rates(self) -> Self:
        """Set ``lr`` and ``min_lr`` if the user did not: ``lr`` is lower if the run starts from trained weights."""
        if self.from_weights and "lr" not in self.model_fields_set:
            object.__setattr__(self, "lr", LORA_RATE if self.lora.rank else FINE_TUNING["lr"])
        if "min_lr" not in self.model_fields_set:
            object.__setattr__(self, "min_lr", self.lr / 10)
        return self

    @model_validator(mode="after")
    def _rows_of_an_evaluation(self) -> Self:
        """Set ``eval_rows``, the only one of the two that the trainer reads, if ``eval_batches`` was given instead."""
        if self.eval_batches and not (self.eval_rows and "eval_rows" in self.model_fields_set):
            object.__setattr__(self, "eval_rows", self.eval_batches * self.micro_batch_size)
            self.model_fields_set.discard("eval_batches")
            self.model_fields_set.add("eval_rows")
        if not self.eval_rows:
            raise UserError("eval_rows", "0 sequences give no validation loss", "give 1 or more, or leave it out: 160")
        return self

    @model_validator(mode="after")
    def _agree(self) -> Self:
        # With decay_steps set, this run may be the first steps of a longer schedule, all of them in its warm-up.
        of_longer = self.decay_steps and "warmup_steps" in self.model_fields_set
        if self.warmup_steps > self.max_steps and not of_longer:
            if "warmup_steps" in self.model_fields_set:
                what = f"{self.warmup_steps} is above max_steps = {self.max_steps}"
                raise UserError("warmup_steps", what, "lower it")
            object.__setattr__(self, "warmup_steps", max(1, self.max_steps // 10))
        if self.decay_steps and self.decay_steps < self.warmup_steps:
            what = f"{self.decay_steps} is below warmup_steps = {self.warmup_steps}"
            raise UserError("decay_steps", what, "raise it, or leave it out: max_steps")
        if self.global_batch_size and self.grad_accum_steps > 1:
            what = f"{self.global_batch_size} already sets how many micro-batches a step has"
            raise UserError("global_batch_size", what, "give it or grad_accum_steps, not both")
        check_tiles(self.tiles, self.model.activation_checkpointing)
        if self.compile == "on" and self.tiles != "none":
            todo = "leave one out: a compiled block is one graph, whose backward torch writes"
            raise UserError("tiles", f"{self.tiles} with compile", todo)
        recomputation = self.model.activation_checkpointing
        if self.compile == "on" and rules.left_uncompiled_with(0, "none", self.sequence_parallel, recomputation):
            what = f"{recomputation} with compile and sequence_parallel: compiled parts keep all"
            raise UserError("model.activation_checkpointing", what, "leave one out, or recompute blocks by full")
        if self.matmul == "fp8":
            self._multiplies_in_8_bits()
        strategy = strategy_entry(self.strategy)
        check_local_steps_settings(self)
        check_wire(self.wire, self.strategy)
        check_offload(self.offload, self.strategy, local_steps=self.local_steps.on)
        check_base(self, "" if strategy.planned else ", ".join(strategies_with("planned")))
        rules.check_cut(self.seq_len, self.sequence_parallel)
        if self.shard_size and not (strategy.planned and (strategy.stage or self.local_steps.on)):
            what = f"{self.strategy} does not shard with zeroshard's engine"
            sharding = [name for name in strategies_with("planned") if STRATEGIES[name].stage]
            raise UserError("shard_size", what, f"leave it out, or use --strategy {', '.join(sharding)}")
        if self.node_copy:
            uses = {"shards": self.strategy == "zero3", "reshards": self.reshard_after_forward}
            todo = "leave it out, or use --strategy zero3"
            rules.check_second_copy("node_copy", self.node_copy, self.strategy, **uses, todo=todo)
        self._strategy_has_them()
        check_optimizer(self)
        if self.keep_best and not self.eval_interval:
            raise UserError("keep_best", "there is one evaluation, at the end", "set eval_interval, or leave it out")
        if self.keep_every and (not self.keep_checkpoints or self.keep_checkpoints < 0 <= self.checkpoint_interval):
            what = f"{self.keep_every} has no effect, because keep_checkpoints = 0 keeps all checkpoints"
            raise UserError("keep_every", what, "set keep_checkpoints to the number of newest checkpoints to keep")
        if not self.overlap and strategy.over_torch:
            what = f"{self.strategy} communicates by torch.distributed, which decides itself what overlaps"
            raise UserError("overlap", what, "leave it out, or use another strategy")
        if self.min_lr > self.lr:
            raise UserError("min_lr", f"{self.min_lr} is above lr = {self.lr}", "lower it, or raise lr")
        self._link_agrees()
        self._fit_agrees()
        if not self.out:
            model = self.model.name.rstrip("/").rpartition("/")[2].removeprefix("hf:") or "model"
            name = f"{model}-{self.data.source}-{self.strategy}".replace("/", "_")
            object.__setattr__(self, "out", f"runs/{name}")
        return self

    def _fit_agrees(self) -> None:
        if self.dry_run and self.fit == "off":
            raise UserError("dry_run", "it prints what fit chooses, and fit is off", "add --fit, or leave it out")
        if self.fit != "off" and not strategy_entry(self.strategy).planned:
            stages = ", ".join(strategies_with("planned"))
            raise UserError("fit", f"no plan knows the memory of {self.strategy}", f"use --strategy {stages}")
        if "base" in self.fit and not self.lora.rank:
            what = "base may have fewer bits where it is frozen, and without adapters all weights are trained"
            raise UserError("fit", what, "leave base out, or add --lora 16")
        if "states" in self.fit and self.optimizer != "adamw":
            what = f"states may have fewer bits where they are those of adamw, and here they are {self.optimizer}'s"
            raise UserError("fit", what, "leave states out")

    def _multiplies_in_8_bits(self) -> None:
        """Check the settings beside ``matmul`` fp8."""
        beside = {"lora.rank": self.lora.rank, "tiles": self.tiles != "none"}
        for field in (name for name, given in beside.items() if given):
            raise UserError("matmul", f"fp8 with {field}: adapters and tiles multiply in dtype", "leave one out")
        num_tokens = self.micro_batch_size * self.part_of_sequence
        if num_tokens % 16:
            what = f"fp8 with {num_tokens:,} tokens in a rank's micro-batch, and kernels need a multiple of 16"
            raise UserError("matmul", what, "change micro_batch_size or seq_len")

    def _strategy_has_them(self) -> None:
        """Check the settings that only some strategies have."""
        name, entry = self.strategy, strategy_entry(self.strategy)
        what = f"{name} does not use zeroshard's engine, and only that has this setting"
        rows = [(field, True, "planned", what) for field in self.changed("prefetch", "accumulate", "reduce_dtype")]
        what = f"{name} keeps unsharded weights all the time"
        rows.append(("reshard_after_forward", not self.reshard_after_forward, "frees_weights", what))
        needs = "matrices" if self.optimizer == "muon" else "blocks of parameters"
        what = f"{self.optimizer} needs unsharded {needs}, and {name} shards them or cannot have its param groups"
        rows.append(("optimizer", self.optimizer != "adamw", "our_optimizers", what))
        what = f"{name} does not run its optimizer unit by unit, for which states are decoded"
        rows.append(("state_format", self.state_format != "fp32", "planned", what))
        rows.append(("plan.enforce", self.plan.enforce, "planned", f"{name} has no plan to be held to"))
        what = f"{name} adds gradients up in an order that depends on the number of ranks"
        rows.append(("reproducible", self.reproducible > 0, "planned", what))
        for field, given, needs, what in rows:
            if given and not getattr(entry, needs):
                raise UserError(field, what, f"leave it out, or use --strategy {', '.join(strategies_with(needs))}")

    def _link_agrees(self) -> None:
        mode, nproc, node_size = self.link.mode, self.nproc, self.link.node_size
        if mode == "simulated" and strategy_entry(self.strategy).over_torch:
            what = f"simulated slows only zeroshard's communicators, and {self.strategy} uses torch.distributed"
            raise UserError("link.mode", what, "use --link.mode netns")
        if mode == "netns" and self.comm != "auto" and not comm_entry(self.comm).over_network:
            others = " or ".join(("auto", *(name for name, entry in COMMUNICATORS.items() if entry.over_network)))
            raise UserError("comm", f"{self.comm} passes no network that netns could slow", f"use {others}")
        if mode == "netns" and (self.max_restarts or self.fit != "off"):
            field = "max_restarts" if self.max_restarts else "fit"
            what = f"{getattr(self, field)} restarts ranks, and inside netns they could not reach the store"
            raise UserError(field, what, "leave it out, or use --link.mode simulated")
        if nproc and nproc % node_size:
            raise UserError(
                "link.node_size", f"groups of {node_size} do not partition {nproc} ranks", "change one of them"
            )
        if mode == "netns" and nproc // node_size < 2:
            what = f"netns joins nodes, and {nproc or 'no'} ranks of {node_size} to a node are fewer than two"
            raise UserError("nproc", what, "give --nproc, at least twice link.node_size")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``over`` into a copy of ``base``, table by table; values of ``over`` win.

    A shorthand in ``base`` (``model = "NAME"``) becomes a table first, so that ``over`` can add keys to it.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, int if key == "lora" else str) and isinstance(value, Mapping):
            old = {SHORTHANDS[key]: old} if key in SHORTHANDS else old
        if isinstance(value, Mapping) and old is not None:
            # If `old` is not a table, keep it: `validate` will refuse it.
            merged[key] = merge(old, value) if isinstance(old, Mapping) else old
        else:
            merged[key] = value
    return merged
