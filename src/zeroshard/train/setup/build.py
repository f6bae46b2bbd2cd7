"""Builds a `Run` from a configuration; `zeroshard.train.loop.loop.train` reads only the `Run`.

Order matters. First come the checks that need no other rank, then ranks connect. Then rank 0 does what one rank must do
alone (prepare the data, create the run folder), and tells the others its outcome. Then every rank builds its own part:
data, plans, model and engine, the run, what it resumes from, and what takes part in it beside its steps.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeroshard import checkpoint
from zeroshard.comm import Communicator, ObservedCommunicator
from zeroshard.comm.agree import first_rank_does, largest
from zeroshard.comm.links import Links
from zeroshard.comm.wrappers.stopwatch import Stopwatch
from zeroshard.host.launch.environment import World, num_restarts, world_from_env
from zeroshard.kernels import describe
from zeroshard.models import LanguageModel
from zeroshard.models.compared_rows import compare_rows
from zeroshard.optim import LossScaler, learning_rate
from zeroshard.parallel.zero import ZeroStrategy
from zeroshard.settings.local_steps import early_momentum, steps_after_last_outer_step
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.step_guard import StepGuard
from zeroshard.train.profiling.flops import Speed, peak_bf16_flops_per_s
from zeroshard.train.records.plan_contract import Predict
from zeroshard.train.records.trackers import require_trackers
from zeroshard.train.setup import assemble, resume
from zeroshard.train.setup.about_run import about_run
from zeroshard.train.setup.agree import start_facts
from zeroshard.train.setup.callbacks import callbacks_of, recorders, users_callbacks, users_classes
from zeroshard.train.setup.corpus import open_corpus
from zeroshard.train.setup.fit import Fit, FitRecord, Fitting, made_to_fit
from zeroshard.train.setup.hugging_face import with_model_files
from zeroshard.train.setup.init_from import load_initial_weights, with_initial_run
from zeroshard.train.setup.numerics import choose_device, on_device
from zeroshard.train.setup.offloading import settled
from zeroshard.train.setup.packing_check import check_examples_apart
from zeroshard.train.setup.plans import Plans
from zeroshard.train.setup.products_in_8_bits import check_products
from zeroshard.train.setup.ranks import join
from zeroshard.train.setup.run_folder import claimed, describe_run
from zeroshard.train.setup.schedule import accumulation_steps, schedule_of, tokens_of_step
from zeroshard.train.state.folders import checkpoint_folder
from zeroshard.train.state.lock import RunLock


@contextmanager
def built(config: TrainConfig, predict: Predict | None = None, fit: Fit | None = None) -> Generator[Run]:
    """Connect the ranks, build this rank's run, yield it, and clean up in any case; arguments as for `build_run`.

    Raises:
        UserError: the configuration cannot be satisfied here; raised on every rank.
    """
    world = world_from_env() or World()
    device = choose_device(config.device, world.local_rank)
    config = _ready(config, device)
    with ExitStack() as stack:
        links, facts = Links.of(config.link), start_facts(config.model_dump())
        joined = join(world, config.comm, config.strategy, device, stack, facts, links, overlap=config.overlap)
        if largest(joined.comm, num_restarts()):  # the largest, because a machine that joined later counts fewer
            # If nothing is saved yet, resume again from the checkpoint that the user named.
            saved = checkpoint.latest(checkpoint_folder(Path(config.out)))
            if config.resume in ("none", "auto") or saved is not None:
                config = config.model_copy(update={"resume": "auto"})
        run = _built(config, joined.comm, device, predict, fit, joined.link)
        stack.callback(run.close)
        yield run


def build_run(
    config: TrainConfig,
    comm: Communicator,
    device: torch.device,
    predict: Predict | None = None,
    fit: Fit | None = None,
) -> Run:
    """Build one rank's part of a run over ranks that are connected already; collective.

    ``predict`` makes the plan that the run is compared with; None: there is none. ``fit`` makes a run fit that asks for
    it; None: it is as given.

    Raises:
        UserError: as `built`.
    """
    return _built(_ready(config, device), comm, device, predict, fit, {})


def _ready(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Fill in what files and the device decide. Raises UserError for what can be known without other ranks."""
    config = on_device(with_model_files(with_initial_run(config)), device)
    check_products(config, device)
    assemble.check_model(config)
    assemble.check_adapters(config)
    require_trackers(config.track)
    users_classes(config)
    describe(device, config.kernels)  # raises if the kernels asked for are not available here
    return config


def _built(
    config: TrainConfig,
    comm: Communicator,
    device: torch.device,
    predict: Predict | None,
    fit: Fit | None,
    link: Mapping[str, Any],
) -> Run:
    """Make the run fit if it asks for that, and build it; ``link``: as `Links.probed` has measured it. Collective."""
    assemble.check_shard_size(config, comm.world_size)
    accumulation_steps(config, comm.world_size)  # raises if the batch does not divide
    with (
        claimed(Path(config.out), comm, resuming=config.resume != "none") as lock,
        checkpoint.parsed_once(),
    ):
        config, fitting = made_to_fit(config, comm, device, fit)
        with fitting.pulls_next_lever(lambda: "before the first step") if fitting else nullcontext():
            return _assembled(config, comm, device, lock, predict, link, fitting)


def _assembled(
    config: TrainConfig,
    comm: Communicator,
    device: torch.device,
    lock: RunLock | None,
    predict: Predict | None,
    link: Mapping[str, Any],
    fitting: Fitting | None,
) -> Run:
    """Build this rank's part of the run, once its folder is locked for it. Collective."""
    folder, as_given = Path(config.out), config
    resume_from = resume.choose(comm, config.resume, checkpoint_folder(folder))

    schedule = schedule_of(config, comm.world_size)
    corpus = open_corpus(config, comm, schedule.grad_accum_steps)
    eos_id = assemble.separating_id(config, corpus.eos_id)
    begins = resume_from is None or config.base.on  # checkpoints lack such a base: it comes from where the run began
    draws = begins and not config.init_from
    _warn(config, comm, draws=draws and resume_from is None)

    plans = Plans(assemble.shapes(config, corpus.vocab_size, eos_id), comm, device, predict)
    config, why_fraction = settled(config, plans)

    observed = ObservedCommunicator(comm)
    model, strategy = assemble.sharded(config, corpus.vocab_size, eos_id, observed, device, draw=draws)
    if config.init_from and begins:
        load_initial_weights(config.init_from, model, strategy, comm)
    if resume_from is None:
        check_examples_apart(config, model, strategy.model, corpus.vocab_size, device)

    run = Run(
        strategy=strategy,
        corpus=corpus,
        learning_rate=partial(learning_rate, **resume.schedule_of(config.model_dump())),
        schedule=schedule,
        folder=folder,
        device=device,
        tokens_per_step=tokens_of_step(config, comm.world_size),
        speed=_speed(config, model, device),
        scaler=_scaler(config, observed),
        guard=StepGuard(config.optim.max_not_finite),
        config=config.model_dump(mode="json"),
        comm=observed,
        kernels=assemble.serving(config, model, device),
        link=link,
        lock=lock,
        clock=Stopwatch(device),
        contract=plans.contract(config),
        out_of_memory=fitting.pulls_next_lever if fitting else nullcontext,
        local_steps=strategy.zero.local_steps if isinstance(strategy, ZeroStrategy) else None,
    )
    saved = resume.load(resume_from, run, config, comm) if resume_from else {}
    if model.sequence is not None:
        compare_rows(strategy.model, model.sequence, device)
    observed.drain()
    observed.exposed.take_seconds()  # what was sent so far is not the run's

    run.about.update(about_run(run, config, plans.model, why_fraction))
    beside = [*callbacks_of(run, config), *([FitRecord(fitting)] if fitting else [])]
    of_users = users_callbacks(run, config, saved)
    # Last, as a run that is refused leaves nothing behind.
    first_rank_does(comm, partial(describe_run, folder, as_given, corpus))
    run.callbacks.extend([*beside, *recorders(run, config), *of_users])
    return run


def _warn(config: TrainConfig, comm: Communicator, *, draws: bool) -> None:
    """Print on rank 0 what is allowed and seldom meant; ``draws``: whether the run begins with drawn weights."""
    warnings = [steps_after_last_outer_step(config.local_steps, config.max_steps)]
    if draws:
        warnings.append(early_momentum(config.local_steps))
    if draws and config.lora.rank and not config.from_weights:
        warnings.append(
            f"warning: lora.rank = {config.lora.rank} trains adapters alone, and the weights of {config.model.name} "
            "stay random; give trained ones with --model hf:FOLDER or --init-from RUN"
        )
    for warning in filter(None, warnings):
        if comm.rank == 0:
            print(warning, file=sys.stderr, flush=True)


def _scaler(config: TrainConfig, comm: Communicator) -> LossScaler | None:
    if config.dtype != "float16":
        return None
    divided_by = comm.world_size if config.has_exact_sums else 1  # as on one rank: [Note: Reproducible] in `step`
    return LossScaler(comm, config.loss_scale, config.loss_scale_interval, divided_by=divided_by)


def _speed(config: TrainConfig, model: LanguageModel, device: torch.device) -> Speed:
    has_peak = device.type == "cuda" and config.dtype != "float32"  # float16 has bfloat16's peak
    peak = peak_bf16_flops_per_s(torch.cuda.get_device_name(device)) if has_peak else None
    again = model.num_recomputed_flops_per_token(config.seq_len)
    return Speed(model.num_flops_per_token(config.seq_len), again, peak)
