"""From a configuration to a run: the only place that has seen both.

Order matters. What can be refused without work is refused first; rank 0 does what one rank must do (prepare the
data, make the run folder) while the others learn how it went; then every rank builds its own part.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard import checkpoint
from zeroshard.comm import Communicator, ObservedCommunicator
from zeroshard.comm.launch import World, num_restarts, world_from_env
from zeroshard.data import EvalBatches, TokenBatches, TokenDataset, require_enough
from zeroshard.data.meta import DataMeta, read_meta
from zeroshard.data.prepare import DataSpec, data_dir, prepare
from zeroshard.errors import UserError
from zeroshard.kernels import choose, describe
from zeroshard.models import GPT2Config, LanguageModel, LlamaConfig, build_model, nearest_preset
from zeroshard.models.presets import model_config
from zeroshard.optim import FusedAdamW, LossScaler, decay_groups, learning_rate
from zeroshard.parallel import FROM_META, Setup, Strategy, build_strategy
from zeroshard.parallel.zero import ZeroStrategy
from zeroshard.profiling.clock import Clock
from zeroshard.profiling.flops import peak_bf16_flops_per_s
from zeroshard.train import resume
from zeroshard.train.agree import agree_on, first_rank_does, model_facts, start_facts
from zeroshard.train.auto import ChooseStage, lowest_stage
from zeroshard.train.compiled import compile_blocks
from zeroshard.train.config import PLANNED, DataConfig, ModelConfig, TrainConfig, dump_toml
from zeroshard.train.contract import Contract, Job, Predict
from zeroshard.train.guard import StepGuard
from zeroshard.train.links import Links
from zeroshard.train.lock import RunLock
from zeroshard.train.measures import Measures
from zeroshard.train.ranks import join
from zeroshard.train.record import ConsoleRecorder, JsonlWriter, Observer, SummaryWriter
from zeroshard.train.run import Run, Schedule, checkpoint_folder
from zeroshard.zero import STAGES

PLAIN_PIECES = ("zero0", "zero1", "zero2", "zero3", "ddp")  # whose optimizer sees tensors and no DTensors
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def built(
    config: TrainConfig, choose_stage: ChooseStage | None = None, predict: Predict | None = None
) -> Generator[Run]:
    """Join the ranks, build this rank's run, and clean up in any case; the other arguments as for `build_run`.

    Raises:
        UserError: something in the configuration cannot be had; on every rank.
    """
    world = world_from_env() or World()
    if num_restarts():
        config = after_restart(config)
    device = choose_device(config.device, world.local_rank)
    check_model(config)
    describe(device, config.kernels)  # refuses what cannot be had
    with ExitStack() as stack:
        links = Links.of(config.link)
        joined = join(world, config.comm, config.strategy, device, stack, start_facts(config.model_dump()), links)
        run = replace(build_run(config, joined.comm, device, choose_stage, predict), link=joined.link)
        stack.callback(run.close)
        yield run


def build_run(
    config: TrainConfig,
    comm: Communicator,
    device: torch.device,
    choose_stage: ChooseStage | None = None,
    predict: Predict | None = None,
) -> Run:
    """Build one rank's part of a run; collective.

    Args:
        config: of the run.
        comm: the ranks.
        device: of this rank.
        choose_stage: for the strategy ``auto``, which else starts at 0.
        predict: what the run should come to; None: nobody plans.

    Raises:
        UserError: as `built`.
    """
    check_model(config)
    check_shard_size(config, comm.world_size)
    describe(device, config.kernels)  # refuses what cannot be had
    grad_accum_steps = accumulation_steps(config, comm.world_size)
    folder = Path(config.out)
    locks: list[RunLock] = []  # rank 0's
    with ExitStack() as undo:
        undo.callback(lambda: [lock.close() for lock in locks])
        resuming = config.resume != "none"
        first_rank_does(comm, lambda: locks.append(claim_folder(folder, resuming=resuming)))
        lock = locks[0] if locks else None
        run = _build_in(folder, config, comm, device, grad_accum_steps, lock, choose_stage, predict)
        undo.pop_all()
    return run


def _build_in(
    folder: Path,
    config: TrainConfig,
    comm: Communicator,
    device: torch.device,
    grad_accum_steps: int,
    lock: RunLock | None,
    choose_stage: ChooseStage | None,
    predict: Predict | None,
) -> Run:
    spec = data_spec(config.data)
    tokens_folder = Path(config.data.dir) if config.data.dir else data_dir(spec)
    resume_from = resume.choose(comm, config.resume, checkpoint_folder(folder))
    first_rank_does(comm, lambda: prepare(spec, tokens_folder))

    agree_on(comm, data_facts(read_meta(tokens_folder)))
    train_tokens, val_tokens = (TokenDataset.open(tokens_folder, split) for split in ("train", "val"))
    rows_per_step = config.micro_batch_size * grad_accum_steps * comm.world_size
    require_enough(train_tokens, config.seq_len, rows_per_step)
    require_enough(val_tokens, config.seq_len, 1, split="val")
    data_sha256 = read_meta(tokens_folder).tokens_sha256

    observed = ObservedCommunicator(comm, timed=config.profile.overlap or config.profile.trace_steps > 0)
    as_given, stage = config, None
    if config.strategy == "auto":
        stage = _automatic_stage(config, train_tokens.vocab_size, comm, device, choose_stage)
        config = config.model_copy(update={"strategy": f"zero{stage}"})
    model, strategy = _model_and_strategy(config, train_tokens.vocab_size, observed, device)
    scaler = LossScaler(observed, config.loss_scale, config.loss_scale_interval) if config.dtype == "float16" else None
    guard = StepGuard(config.optim.max_not_finite, config.optim.skip_spikes)
    first_step = 0
    if resume_from is not None:
        changes = resume.check_changes(
            checkpoint.read_manifest(resume_from).extra,
            config.model_dump(mode="json"),
            rows_per_step * config.seq_len,
            data_sha256,
        )
        try:
            saved = checkpoint.load(resume_from, strategy, verified=config.resume == "auto")
            first_step = int(saved["step"])
            if scaler is not None and saved.get("loss_scaler"):
                scaler.load_state_dict(saved["loss_scaler"])
            guard.load_state_dict(saved.get("guard") or guard.state_dict())
        except UserError:
            raise
        except ValueError as error:
            todo = "resume with the model and optimizer that the checkpoint was saved with"
            raise UserError("resume", f"{resume_from}: {error}", todo) from None
        resume.say_start(comm, resume_from, changes)
    describe_run = partial(_describe, folder, as_given, tokens_folder)
    first_rank_does(comm, describe_run)  # from here on the folder holds a run
    observed.drain()

    measures = Measures(config.profile, strategy, observed, _named_units(strategy), folder, device)
    saves = isinstance(strategy.optimizer, FusedAdamW)
    contract = _contract(config, train_tokens.vocab_size, observed, device, grad_accum_steps, predict, saves)
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    shapes = {"seq_len": config.seq_len, "micro_batch_size": config.micro_batch_size}
    accumulation = {"grad_accum_steps": grad_accum_steps, "seed": config.seed}
    return Run(
        strategy=strategy,
        batches=TokenBatches(train_tokens, **shapes, **accumulation, **ranks),
        eval_batches=EvalBatches(val_tokens, **shapes, num_batches=config.eval_batches, **ranks),
        learning_rate=partial(
            learning_rate,
            lr=config.lr,
            min_lr=config.min_lr,
            warmup_steps=config.warmup_steps,
            max_steps=config.max_steps,
        ),
        schedule=Schedule(
            max_steps=config.max_steps,
            grad_clip=config.grad_clip,
            eval_interval=config.eval_interval,
            checkpoint_interval=config.checkpoint_interval,
            checkpoint_async=config.checkpoint_async,
            keep_checkpoints=config.keep_checkpoints,
            keep_every=config.keep_every,
            **accumulation,
        ),
        observers=_observers(config, folder) if comm.rank == 0 else (),
        folder=folder,
        device=device,
        tokens_per_step=rows_per_step * config.seq_len,
        num_flops_per_token=model.num_flops_per_token(config.seq_len),
        num_recomputed_flops_per_token=model.num_recomputed_flops_per_token(config.seq_len),
        peak_flops_per_s=_peak_flops_per_s(config.dtype, device),
        first_step=first_step,
        scaler=scaler,
        guard=guard,
        config=config.model_dump(mode="json"),
        stage=stage,
        comm=observed,
        kernels=_kernels(config, model, strategy, device),
        data_sha256=data_sha256,
        lock=lock,
        describe=describe_run,
        clock=Clock(device),
        measures=measures,
        contract=contract,
    )


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank: ``auto`` takes a GPU where there is one.

    Raises:
        UserError: CUDA was asked for and is not there, or has fewer devices than this machine has ranks.
    """
    num_gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if local_rank >= num_gpus:
        what = f"rank {local_rank} of this machine finds {num_gpus} CUDA devices"
        raise UserError("device", what, "start at most as many ranks as there are GPUs, or use --device cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def check_model(config: TrainConfig) -> None:
    """Raise UserError where the model cannot be built, or is too short for ``seq_len``; builds nothing."""
    longest = model_config(config.model.name, overrides=model_overrides(config.model)).seq_len
    if config.seq_len > longest:
        what = f"{config.seq_len} is above the {longest} of {config.model.name}"
        raise UserError("seq_len", what, f"use {longest} or less, or a model with longer sequences")


def check_shard_size(config: TrainConfig, world_size: int) -> None:
    """Raise UserError where the world cannot be shared out to groups of ``shard_size``."""
    if config.shard_size and world_size % config.shard_size:
        sizes = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        what = f"{config.shard_size} does not divide a world of {world_size}"
        raise UserError("shard_size", what, f"choose one of {sizes}, or 0 for all ranks")


def accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Micro-batches of each rank in a step.

    Raises:
        UserError: ``global_batch_size`` is set and cannot be shared out.
    """
    if not config.global_batch_size:
        return config.grad_accum_steps
    rows, at_once = config.global_batch_size, config.micro_batch_size * world_size
    if rows < world_size:
        what = f"{rows} sequences cannot feed {world_size} ranks"
        raise UserError("global_batch_size", what, f"use at least {world_size}, or fewer ranks")
    if rows % at_once:
        what = f"{rows} is no multiple of {config.micro_batch_size} (micro_batch_size) x {world_size} ranks"
        raise UserError("global_batch_size", what, "change one of the three")
    return rows // at_once


def make_model(config: TrainConfig, vocab_size: int, device: torch.device | str) -> LanguageModel:
    """The model of ``config``: on ``device``, or without values on ``"meta"``."""
    with torch.device(device):
        return build_model(
            config.model.name,
            vocab_size=vocab_size,
            overrides=model_overrides(config.model),
            seed=config.seed,
            kernels=config.kernels,
        )


def data_spec(data: DataConfig) -> DataSpec:
    """What to prepare."""
    return DataSpec(data.source, data.path, data.tokenizer, data.val_fraction, max_tokens=data.max_tokens)


def tokenizer_folder(run_folder: Path) -> Path:
    """Where a run keeps what its tokenizer needs, so that it can write text without its training data."""
    return run_folder / "tokenizer"


def after_restart(config: TrainConfig) -> TrainConfig:
    """The configuration of a world that was started again: it goes on from what it has saved since, if anything."""
    if config.resume not in ("none", "auto") and checkpoint.latest(checkpoint_folder(Path(config.out))) is None:
        return config  # the checkpoint that it was to start from is still the newest
    return config.model_copy(update={"resume": "auto"})


def claim_folder(folder: Path, *, resuming: bool) -> RunLock:
    """Make the run folder, or see that the one that is there may be used, and hold it.

    Raises:
        UserError: another run is writing there; it holds a run and this one does not resume; it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder)
    except OSError as error:
        raise UserError(
            "out", f"{folder} cannot be written ({error.strerror})", "choose a folder that you may write"
        ) from None
    if not resuming and any((folder / name).exists() for name in ("config.toml", "metrics.jsonl")):
        lock.close()
        raise UserError(
            "out", f"{folder} already holds a run", "choose another --out, or go on with it by --resume auto"
        )
    return lock


def data_facts(meta: DataMeta) -> dict[str, object]:
    """What must be the same where every rank reads its own copy of the data."""
    files = {f"data {shard.file}": shard.sha256 for split in meta.splits.values() for shard in split.shards}
    return {"data vocab_size": meta.vocab_size, **files}


def _describe(folder: Path, config: TrainConfig, tokens_folder: Path) -> None:
    (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    kept = tokenizer_folder(folder)
    kept.mkdir(exist_ok=True)
    for name in ("meta.json", "tokenizer.json"):
        if (tokens_folder / name).exists():
            shutil.copyfile(tokens_folder / name, kept / name)


def _model_and_strategy(
    config: TrainConfig, vocab_size: int, comm: Communicator, device: torch.device
) -> tuple[LanguageModel, Strategy]:
    if 0 < config.model.vocab_size < vocab_size:
        what = f"{config.model.vocab_size} is below the {vocab_size} ids of the tokens"
        raise UserError("model.vocab_size", what, "use tokens made for this model, or 0 for a vocabulary of their size")
    from_meta = config.strategy in FROM_META
    model = make_model(config, vocab_size, "meta" if from_meta else device)
    if config.compile:
        compile_blocks(model.blocks, config.compile_backend, device)

    def init(name: str, param: Tensor) -> None:
        model.init_parameter(name, param)

    agree_on(comm, model_facts(model))

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        return decay_groups(module.named_parameters(), config.weight_decay)

    optimizer_cls, optimizer_kwargs = _optimizer(config, device)
    setup = Setup(
        model=model,
        units=list(model.blocks),
        comm=comm,
        optimizer_cls=optimizer_cls,
        param_groups=groups,
        optimizer_kwargs=optimizer_kwargs,
        compute_dtype=DTYPES[config.dtype],
        init=init if from_meta else None,
        device=device,
        shard_size=config.shard_size or None,
        reshard_after_forward=config.reshard_after_forward,
        ema_decay=config.ema_decay or None,
    )
    return model, build_strategy(config.strategy, setup)


def _named_units(strategy: Strategy) -> list[tuple[str, nn.Module]]:
    """What a trace names: our engine's units, elsewhere the model's blocks."""
    if isinstance(strategy, ZeroStrategy):
        return [(unit.name, unit.module) for unit in strategy.zero.units]
    return [
        (name, module) for name, module in strategy.model.named_modules() if re.fullmatch(r"(.*\.)?blocks\.\d+", name)
    ]


def _contract(
    config: TrainConfig,
    vocab_size: int,
    comm: Communicator,
    device: torch.device,
    grad_accum_steps: int,
    predict: Predict | None,
    saves_passes: bool,
) -> Contract | None:
    if predict is None or config.strategy not in PLANNED:
        return None
    job = Job(
        model=make_model(config, vocab_size, "meta"),
        row=replace(STAGES[int(config.strategy[-1])], reshard_after_forward=config.reshard_after_forward),
        rank=comm.rank,
        world_size=comm.world_size,
        shard_size=config.shard_size or comm.world_size,
        compute_dtype=DTYPES[config.dtype],
        num_micro=grad_accum_steps,
        micro_batch_size=config.micro_batch_size,
        seq_len=config.seq_len,
        uniform_order=comm.uniform_order,
        device_type=device.type,
        keeps_ema=config.ema_decay > 0,
        saves_passes=saves_passes,
        calibration=config.plan.device,
    )
    return Contract(predict(job), config.plan.enforce)


def _automatic_stage(
    config: TrainConfig, vocab_size: int, comm: Communicator, device: torch.device, choose_stage: ChooseStage | None
) -> int:
    chosen = 0, "where nobody predicts"
    if choose_stage is not None:
        chosen = choose_stage(make_model(config, vocab_size, "meta"), comm.world_size, DTYPES[config.dtype], device)
    stage, why = lowest_stage(chosen, comm, Path(config.out), resuming=config.resume != "none")
    if comm.rank == 0:
        print(f"strategy auto: zero{stage}: {why}")
    return stage


def _optimizer(config: TrainConfig, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Our kernel's AdamW where Triton serves and torch does not shard, else torch's; their states are alike."""
    kwargs: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2)}
    if config.fused and config.strategy in PLAIN_PIECES and choose("adamw", device, config.kernels) == "triton":
        return FusedAdamW, {**kwargs, "kernels": "triton"}
    return torch.optim.AdamW, {**kwargs, "fused": config.fused}


def _kernels(config: TrainConfig, model: LanguageModel, strategy: Strategy, device: torch.device) -> dict[str, str]:
    """Who serves each operation of this run."""
    optimizer = ("adamw", "sum_of_squares") if isinstance(strategy.optimizer, FusedAdamW) else ()
    served: dict[str, str] = dict(describe(device, config.kernels, (*model.operations, *optimizer)))
    return served if optimizer else {**served, "AdamW": "torch fused" if config.fused else "torch"}


def model_overrides(model: ModelConfig) -> dict[str, object]:
    """What replaces the preset's values: the fields that differ from "as the preset says"."""
    unset = ModelConfig().model_dump()
    changed = {name: value for name, value in model.model_dump().items() if name != "name" and value != unset[name]}
    if "tie_embeddings" in changed:
        changed["tie_embeddings"] = model.tie_embeddings == "yes"
    return changed


def model_table(config: GPT2Config | LlamaConfig) -> ModelConfig:
    """How a run's configuration says that its model is ``config``."""
    name, changes = nearest_preset(config)
    if "tie_embeddings" in changes:
        changes["tie_embeddings"] = "yes" if changes["tie_embeddings"] else "no"
    return ModelConfig.model_validate({"name": name, **changes, "vocab_size": config.vocab_size})


def _observers(config: TrainConfig, folder: Path) -> list[Observer]:
    return [
        JsonlWriter(folder / "metrics.jsonl"),
        SummaryWriter(folder / "summary.json"),
        ConsoleRecorder(config.max_steps, config.log_interval, sys.stdout),
    ]


def _peak_flops_per_s(dtype: str, device: torch.device) -> float | None:
    if device.type != "cuda" or dtype == "float32":
        return None  # float16 has bfloat16's peak
    return peak_bf16_flops_per_s(torch.cuda.get_device_name(device))
