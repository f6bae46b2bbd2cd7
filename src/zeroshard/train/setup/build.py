"""Builds a `Run` from a configuration; `zeroshard.train.loop.loop.train` reads only the `Run`.

Order matters. First come the checks that need no work. Then rank 0 does what one rank must do alone (prepare the data,
create the run folder), and tells the others its outcome. Then every rank builds its own part.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from zeroshard import checkpoint
from zeroshard.comm import Communicator, ObservedCommunicator
from zeroshard.comm.agree import first_rank_does, largest
from zeroshard.comm.wrappers.stopwatch import Stopwatch
from zeroshard.host.errors import UserError
from zeroshard.host.launch.environment import World, num_restarts, world_from_env
from zeroshard.kernels import describe
from zeroshard.models import LanguageModel
from zeroshard.models.compared_rows import compare_rows
from zeroshard.optim import LossScaler, learning_rate
from zeroshard.parallel.zero import ZeroStrategy
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.local_steps_settings import early_momentum, steps_after_last_outer_step
from zeroshard.train.links import Links
from zeroshard.train.loop.best_loss import BestLoss
from zeroshard.train.loop.measures import Measures
from zeroshard.train.loop.outer_steps import other_replicas, own_guard
from zeroshard.train.loop.run import Corpus, Run, Schedule
from zeroshard.train.loop.step_guard import StepGuard
from zeroshard.train.profiling.flops import peak_bf16_flops_per_s
from zeroshard.train.records.console import ConsoleRecorder
from zeroshard.train.records.log_files import LogFiles
from zeroshard.train.records.origin import now
from zeroshard.train.records.plan_contract import Predict
from zeroshard.train.records.records import Observer
from zeroshard.train.records.trackers import require_trackers, trackers
from zeroshard.train.setup import resume
from zeroshard.train.setup.about_run import about_run, next_command
from zeroshard.train.setup.agree import start_facts
from zeroshard.train.setup.assemble import (
    attention_boundary_setting,
    check_adapters,
    check_model,
    check_shard_size,
    make_model,
    separating_id,
    serving,
    sharded,
    take_dtype_of_weights,
)
from zeroshard.train.setup.auto import automatic_stage, contract_of
from zeroshard.train.setup.corpus import open_corpus
from zeroshard.train.setup.hugging_face import with_model_files
from zeroshard.train.setup.init_from import load_initial_weights, with_initial_run
from zeroshard.train.setup.numerics import on_device
from zeroshard.train.setup.offloading import settled
from zeroshard.train.setup.packing_check import require_apart
from zeroshard.train.setup.products_in_8_bits import check_products
from zeroshard.train.setup.ranks import join
from zeroshard.train.setup.run_folder import ClaimedFolder, describe_run
from zeroshard.train.state.folders import checkpoint_folder
from zeroshard.train.state.lock import RunLock
from zeroshard.train.state.saved_run import saved_run

KEPT_AT_EVALUATIONS = 2  # of the checkpoints that are written at evaluations, by default


@contextmanager
def built(config: TrainConfig, predict: Predict | None = None) -> Generator[Run]:
    """Connect the ranks, build this rank's run, yield it, and clean up in any case; arguments as for `build_run`.

    Raises:
        UserError: the configuration cannot be satisfied here; raised on every rank.
    """
    world = world_from_env() or World()
    config = with_model_files(with_initial_run(config))
    device = choose_device(config.device, world.local_rank)
    config = on_device(config, device)
    check_model(config)
    describe(device, config.kernels)  # raises if the kernels asked for are not available here
    with ExitStack() as stack:
        links = Links.of(config.link)
        facts = start_facts(config.model_dump())
        joined = join(world, config.comm, config.strategy, device, stack, facts, links, overlap=config.overlap)
        if largest(joined.comm, num_restarts()):  # the largest, because a machine that joined later counts fewer
            # If nothing is saved yet, resume again from the checkpoint that the user named.
            saved = checkpoint.latest(checkpoint_folder(Path(config.out)))
            if config.resume in ("none", "auto") or saved is not None:
                config = config.model_copy(update={"resume": "auto"})
        run = replace(build_run(config, joined.comm, device, predict), link=joined.link)
        stack.callback(run.close)
        yield run


def build_run(config: TrainConfig, comm: Communicator, device: torch.device, predict: Predict | None = None) -> Run:
    """Build one rank's part of a run; collective.

    ``predict`` makes the plan that the run is compared with, and those by which the strategy ``auto`` chooses a stage;
    None: there is no plan, and ``auto`` starts at stage 0.

    Raises:
        UserError: as `built`.
    """
    config = on_device(with_model_files(with_initial_run(config)), device)
    check_products(config, device)
    check_model(config)
    check_adapters(config)
    require_trackers(config.track)
    check_shard_size(config, comm.world_size)
    describe(device, config.kernels)  # raises if the kernels asked for are not available here
    accumulation_steps(config, comm.world_size)  # raises if the batch does not divide
    folder = Path(config.out)
    claimed: list[ClaimedFolder] = []  # filled on rank 0 alone
    with ExitStack() as undo:
        undo.callback(lambda: [each.discard() for each in claimed])
        resuming = config.resume != "none"
        first_rank_does(comm, lambda: claimed.append(ClaimedFolder(folder, resuming=resuming)))
        lock = claimed[0].lock if claimed else None
        with checkpoint.parsed_once():
            run = _build_in(folder, config, comm, device, lock, predict)
        undo.pop_all()
    return run


def _adapters_of_drawn_weights(config: TrainConfig) -> str:
    """Return a warning if adapters are trained, and the weights that they change stay as they were drawn; else ""."""
    if not config.lora.rank or config.from_weights:
        return ""
    return (
        f"warning: lora.rank = {config.lora.rank} trains adapters alone, and the weights of {config.model.name} stay "
        "random; give trained ones with --model hf:FOLDER or --init-from RUN"
    )


def _build_in(
    folder: Path,
    config: TrainConfig,
    comm: Communicator,
    device: torch.device,
    lock: RunLock | None,
    predict: Predict | None,
) -> Run:
    """Build this rank's part of the run, once ``folder`` is locked for it. Collective."""
    schedule = _schedule(config, comm.world_size)
    resume_from = resume.choose(comm, config.resume, checkpoint_folder(folder))
    corpus = open_corpus(config, comm, schedule.grad_accum_steps)
    observed = ObservedCommunicator(comm)
    as_given, stage = config, None
    eos_id = separating_id(config, corpus.eos_id)
    draw = resume_from is None and not config.init_from
    unaligned = steps_after_last_outer_step(config.local_steps, config.max_steps)
    new = (early_momentum(config.local_steps), _adapters_of_drawn_weights(config)) if draw else ()
    for warning in (unaligned, *new):
        if warning and comm.rank == 0:
            print(warning, file=sys.stderr, flush=True)
    if config.strategy == "auto":
        shapes = _shapes(config, corpus.vocab_size, eos_id)
        stage = automatic_stage(config, shapes, comm, device, schedule.grad_accum_steps, predict)
        config = config.model_copy(update={"strategy": f"zero{stage}"})
    why_fraction = ""
    if config.offload.on:
        shapes = _shapes(config, corpus.vocab_size, eos_id)
        config, why_fraction = settled(config, shapes, comm, device, schedule.grad_accum_steps, predict)
    model, strategy = sharded(config, corpus.vocab_size, eos_id, observed, device, draw=draw)
    if config.init_from and resume_from is None:
        load_initial_weights(config.init_from, model, strategy, comm)
    setting = attention_boundary_setting(config)
    if setting and resume_from is None and not model.keeps_examples_apart:
        sizes = corpus.vocab_size, config.micro_batch_size, config.seq_len // config.sequence_parallel
        with nullcontext() if model.sequence is None else model.sequence.paused():
            require_apart(strategy.model, setting, *sizes, device)
        observed.exposed.take_seconds()  # the check's own waits are not the run's
    scaler = None
    if config.dtype == "float16":
        divided_by = comm.world_size if config.reproducible else 1  # as on one rank: [Note: Reproducible] in `step`
        scaler = LossScaler(observed, config.loss_scale, config.loss_scale_interval, divided_by=divided_by)
    run = Run(
        strategy=strategy,
        corpus=corpus,
        learning_rate=partial(learning_rate, **resume.schedule_of(config.model_dump())),
        schedule=schedule,
        observers=(),
        folder=folder,
        device=device,
        tokens_per_step=_rows_at_once(config, comm.world_size) * schedule.grad_accum_steps * config.seq_len,
        scaler=scaler,
        guard=StepGuard(config.optim.max_not_finite),
        best=BestLoss(),
        config=config.model_dump(mode="json"),
        stage=stage,
        why_fraction=why_fraction,
        comm=observed,
        lock=lock,
        clock=Stopwatch(device),
        local_steps=strategy.zero.local_steps if isinstance(strategy, ZeroStrategy) else None,
    )
    if resume_from is not None:
        run = _resumed(run, resume_from, config, corpus, comm)
    if model.sequence is not None:
        compare_rows(strategy.model, model.sequence, device)
        observed.exposed.take_seconds()  # the comparison's own waits are not the run's
    return _with_records(run, config, as_given, model, comm, predict)


def _with_records(
    run: Run,
    config: TrainConfig,
    as_given: TrainConfig,
    model: LanguageModel,
    comm: Communicator,
    predict: Predict | None,
) -> Run:
    """Return ``run`` with observers, measurements and plan; writes its configuration into the folder. Collective.

    ``as_given``: the configuration whose strategy may be ``auto``.
    """
    observed, corpus = run.comm, run.corpus
    assert observed is not None
    observed.drain()

    strategy, device, num_micro = run.strategy, run.device, run.schedule.grad_accum_steps
    # a trace labels units of our engine, or with other strategies the model's blocks
    blocks = (each for each in strategy.model.named_modules() if re.fullmatch(r"(.*\.)?blocks\.\d+", each[0]))
    is_ours = isinstance(strategy, ZeroStrategy)
    units = [(unit.name, unit.module) for unit in strategy.zero.units] if is_ours else list(blocks)
    # float16 has bfloat16's peak
    has_peak = device.type == "cuda" and config.dtype != "float32"
    shapes = _shapes(config, corpus.vocab_size, separating_id(config, corpus.eos_id))
    run = replace(
        run,
        num_flops_per_token=model.num_flops_per_token(config.seq_len),
        num_recomputed_flops_per_token=model.num_recomputed_flops_per_token(config.seq_len),
        peak_flops_per_s=peak_bf16_flops_per_s(torch.cuda.get_device_name(device)) if has_peak else None,
        kernels=serving(config, model, device),
        measures=Measures(config.profile, strategy, observed, units, run.folder, device),
        contract=contract_of(config, shapes, observed, device, num_micro, predict),
        about=about_run(run, config, shapes),
    )
    # Last, as a run that is refused leaves nothing behind.
    first_rank_does(comm, partial(describe_run, run.folder, as_given, corpus))
    observers: list[Observer] = []  # filled on rank 0 alone

    def observe() -> None:
        observers.append(LogFiles(run.folder, now, run.require_folder))
        next_is = next_command(config, run.folder)
        observers.append(ConsoleRecorder(config.max_steps, config.log_interval, next_command=next_is))
        observers.extend(trackers(config.track, run.folder, config.model_dump(mode="json")))

    first_rank_does(comm, observe)
    return replace(run, observers=observers)


def _resumed(run: Run, path: Path, config: TrainConfig, corpus: Corpus, comm: Communicator) -> Run:
    """Load the checkpoint at ``path`` into ``run``, after checking which settings have changed. Collective."""
    saved = saved_run(path)
    now = config.model_dump(mode="json")
    changes = resume.check_changes(saved, now, run.tokens_per_step, corpus.sha256)
    run.best.load_state_dict(saved.get("best") or run.best.state_dict())
    world_before = checkpoint.read_manifest(path).world_size
    changes += other_replicas(saved.get("config", {}), world_before, now, comm.world_size)
    first_step = _load(path, run, verified=config.resume == "auto")
    position = saved.get("position", {})
    corpus.restore_position(position.get("stream"), first_step)
    resume.say_start(comm, path, changes)
    # Of `--resume auto` these are the ones that were passed over, which must not count as checkpoints that are kept.
    first_rank_does(comm, partial(resume.leave_branch, checkpoint_folder(run.folder), first_step))
    first_token = position.get("tokens", first_step * run.tokens_per_step)
    return replace(run, first_step=first_step, first_token=first_token)


def _load(path: Path, run: Run, *, verified: bool) -> int:
    """Load a checkpoint into the run; returns the number of steps completed in it. Collective.

    Raises:
        UserError: the checkpoint is of another model or optimizer, or cannot be read.
    """
    try:
        # The optimizer keeps the configuration's settings; changes of them are reported by `resume.check_changes`.
        saved = checkpoint.load(path, run.strategy, verified=verified, settings=False)
        if run.scaler is not None and saved.get("loss_scaler"):
            run.scaler.load_state_dict(saved["loss_scaler"])
        run.guard.load_state_dict(own_guard(saved, run.local_steps) or run.guard.state_dict())
        return int(saved["step"])
    except UserError:
        raise
    except ValueError as error:
        todo = "resume with the model and optimizer that the checkpoint was saved with"
        raise UserError("resume", f"{path}: {error}", todo) from None


def _schedule(config: TrainConfig, world_size: int) -> Schedule:
    at_evaluations = config.checkpoint_interval < 0
    kept = KEPT_AT_EVALUATIONS if at_evaluations else 0
    return Schedule(
        max_steps=config.max_steps,
        grad_clip=config.grad_clip,
        eval_interval=config.eval_interval,
        checkpoint_interval=config.eval_interval if at_evaluations else config.checkpoint_interval,
        # of state in a file there is no memory for copies
        checkpoint_async=config.checkpoint_async and not config.offload.on_disk,
        keep_checkpoints=kept if config.keep_checkpoints < 0 else config.keep_checkpoints,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        grad_accum_steps=accumulation_steps(config, world_size),
        seed=config.seed,
        reproducible=config.reproducible > 0,
    )


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of this rank and make it current if it is a GPU; ``auto`` takes a GPU if there is one.

    Raises:
        UserError: there is no GPU for this rank: CUDA was asked for without GPUs, or there are more ranks than GPUs.
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


def _rows_at_once(config: TrainConfig, world_size: int) -> int:
    """Sequences of all ranks in one forward pass."""
    return config.micro_batch_size * (world_size // config.sequence_parallel)


def accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Return the number of micro-batches of each rank in a step.

    Raises:
        UserError: ``global_batch_size`` is set and does not divide into micro-batches for all ranks.
    """
    micro, rows, size = config.micro_batch_size, config.global_batch_size, config.sequence_parallel
    groups = world_size // size  # of ranks that share sequences
    if config.reproducible:  # the number of sequences in a step does not depend on the number of ranks
        at_once = micro * config.reproducible
        if rows % at_once:
            what = f"{rows} is no multiple of {micro} (micro_batch_size) x {config.reproducible} (reproducible)"
            raise UserError("global_batch_size", what, "change one of the three")
        return (rows or at_once * config.grad_accum_steps) // (micro * groups)
    if not rows:
        return config.grad_accum_steps
    named = f"{groups} ranks" if size == 1 else f"{groups} groups of {size} ranks that share sequences"
    if rows < groups:
        what = f"{rows} sequences cannot feed {named}"
        raise UserError("global_batch_size", what, f"use at least {groups}, or fewer ranks")
    if rows % (micro * groups):
        what = f"{rows} is no multiple of {micro} (micro_batch_size) x {named}"
        raise UserError("global_batch_size", what, "change one of the three")
    return rows // (micro * groups)


def _shapes(config: TrainConfig, vocab_size: int, eos_id: int | None) -> LanguageModel:
    """The model of a run on the meta device, to plan with and to count its parameters."""
    model = make_model(config, vocab_size, "meta")
    take_dtype_of_weights(config, model)
    # Packed rows have an attention mask too, so any id stands for it.
    model.eos_id = 0 if eos_id is None and attention_boundary_setting(config) else eos_id
    return model
