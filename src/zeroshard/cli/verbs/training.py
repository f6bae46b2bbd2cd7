"""The verbs for training: runs and their data, and generation, evaluation, export and import of models."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from zeroshard.cli.flags import take_option
from zeroshard.cli.submit import SubmitConfig
from zeroshard.cli.verbs.base import checked_settings, read_file, say
from zeroshard.host import process
from zeroshard.host.errors import ExitStatus, UserError, path_line, warn
from zeroshard.parallel.registry import STRATEGIES
from zeroshard.settings.sizes import parse_nnodes
from zeroshard.train.config.command_settings import (
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    PrepareConfig,
)
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.data_section import require_data

if TYPE_CHECKING:
    from zeroshard.host.launch.ending import Ending
    from zeroshard.host.launch.environment import NetnsNodes

MOST_LEVERS = 16  # more than `--fit` has
# Modules that each rank imports in any case. torch's optimizers import torch._dynamo at their first step: seconds.
TRAINS = ("zeroshard.train.start", "torch._dynamo")
_ASKS = "see what it printed"  # how a lost rank's line ends, see `zeroshard.comm`
RUN = "give a run folder, as runs/NAME"
LEAST_BYTES_OF_A_RANK = 32 * 2**20  # private memory, even of a rank forked from a process that has imported torch


def train(config: TrainConfig, argv: Sequence[str]) -> int:
    """Run `zeroshard train`: as a rank, or as the launcher that starts the ranks."""
    from zeroshard.host.launch import environment, rank_exit, rendezvous_address, start_ranks

    require_data(config.data)
    process.prepare_torch()
    world = environment.world_from_env()
    several = config.nnodes != "1"
    if world is None and (config.nproc > 1 or several or config.fit != "off"):
        require_room(config.nproc)
        environment.end_with_starter()
        rendezvous = (
            rendezvous_address.rendezvous_at(config.rdzv_endpoint, *parse_nnodes(config.nnodes)) if several else None
        )
        nproc = max(1, config.nproc)
        with _nodes(config) as nodes:
            ending = start_ranks.launch_workers(
                argv,
                nproc,
                config.port,
                config.max_restarts,
                MOST_LEVERS if config.fit != "off" else 0,
                rendezvous=rendezvous,
                nodes=nodes,
                imports=(*TRAINS, *_of_strategy(config.strategy)),
                after_oom_kill=partial(_after_oom_kill, config.out) if config.fit != "off" else None,
            )
        if ending.line:
            say(ending.line)
        return ending.status
    num_tasks = environment.num_tasks_without_srun() if world is None else 0
    if num_tasks > 1:
        warn(f"nproc: SLURM has {num_tasks} tasks for this job, and this run has one rank: srun did not start it")
    if world is not None and not several and config.nproc not in (0, world.world_size):
        raise UserError(
            "nproc", f"{config.nproc} ranks in a world of {world.world_size}", "leave --nproc out under a launcher"
        )
    faulthandler.enable(2)  # a crash in C code, such as reading a truncated mapped file, at least prints a traceback
    with rank_exit.ended_with_launcher():
        from zeroshard.comm import PeerError
        from zeroshard.train.start import run_training

        try:
            return run_training(config, _predict, _fit)
        except PeerError as error:
            lost_first = str(error).startswith("rank 0")
            why = "; if that is nothing, it was killed, perhaps for its memory" if _ASKS in str(error) else ""
            line = f"rank {world.rank if world else 0}: {error}{why}; start again with --resume auto"
            say(line, all_ranks=lost_first)
            return ExitStatus.PEER_LOST


def _after_oom_kill(out: str, rank: int) -> Ending | None:
    from zeroshard.host.launch.ending import Ending
    from zeroshard.train.setup.fit import after_oom_kill

    said = after_oom_kill(out, rank)
    return Ending(*said) if said else None


def _of_strategy(name: str) -> tuple[str, ...]:
    """The modules that ranks import for a built-in strategy; a user's own strategy is imported by the ranks."""
    entry = STRATEGIES.get(name)
    return (entry.module,) if entry and entry.module else ()


def require_room(nproc: int) -> None:
    """Raise UserError if ``nproc`` ranks need more memory than this machine has just to start."""
    there = psutil.virtual_memory().total + psutil.swap_memory().total
    most = max(1, there // LEAST_BYTES_OF_A_RANK)
    if nproc > most:
        what = f"{nproc:,} ranks do not fit into this machine's {there / 2**30:,.0f} GiB"
        raise UserError("nproc", what, f"give {most:,} or fewer; plan larger worlds with zeroshard plan --gpus")


def _nodes(config: TrainConfig) -> AbstractContextManager[NetnsNodes | None]:
    """The network namespaces in which a run's ranks start, if ``link.mode`` is ``netns``; else None."""
    if config.link.mode != "netns":
        return nullcontext()
    from zeroshard.lab.network import nodes
    from zeroshard.settings.sizes import parse_bandwidth, parse_duration, parse_size

    link = config.link
    return nodes(
        config.nproc // link.node_size,
        link.node_size,
        parse_bandwidth("link.bandwidth", link.bandwidth),
        parse_duration("link.latency", link.latency or "0s"),
        parse_size("link.burst", link.burst) if link.burst else 0,
    )


def _predict(job: Any) -> Any:
    from zeroshard.lab.planner.run_plan import predict

    return predict(job)


def _fit(job: Any) -> Any:
    from zeroshard.lab.planner.fit_run import fit_run

    return fit_run(job)


def prepare(config: PrepareConfig, argv: Sequence[str]) -> int:
    """Run `zeroshard prepare`: writes tokens to disk, or checks those that are there."""
    from zeroshard.train.setup.prepare_data import run_prepare, run_verify

    if config.verify:
        return run_verify(config.data)
    return written(config.data.dir or "data", lambda: run_prepare(config.data))


def generate(config: GenerateConfig, argv: Sequence[str]) -> int:
    """Run `zeroshard generate`: prints text as it is drawn."""
    require_there("run", config.run, RUN)
    from zeroshard.train.inference.generate import run_generate

    return run_generate(config)


def evaluate(config: EvalConfig, argv: Sequence[str]) -> int:
    """Run `zeroshard eval`: prints loss, perplexity and bits per byte."""
    from zeroshard.host.launch import environment, rank_exit, start_ranks

    process.prepare_torch()
    if environment.world_from_env() is None and config.nproc > 1:
        require_room(config.nproc)
        imports = ("zeroshard.train.inference.evaluation",)
        ending = start_ranks.launch_workers(argv, config.nproc, config.port, imports=imports)
        if ending.line:
            say(ending.line)
        return ending.status
    require_there("run", config.run, RUN)
    with rank_exit.ended_with_launcher():
        from zeroshard.train.inference.evaluation import run_eval

        return run_eval(config)


def export(config: ExportConfig, argv: Sequence[str]) -> int:
    """Run `zeroshard export`: writes a Hugging Face folder from a run."""
    require_there("source", config.source, "give a run folder or a checkpoint")
    from zeroshard.integrations.hf_export import run_export

    return written(config.out, lambda: run_export(config))


def import_model(config: ImportConfig, argv: Sequence[str]) -> int:
    """Run `zeroshard import`: makes a run from a Hugging Face or nanoGPT model."""
    require_there("source", config.source, "give a model's folder, or nanoGPT's ckpt.pt")
    from zeroshard.integrations.hf_import import run_import

    return written(config.out, lambda: run_import(config))


def require_there(field: str, path: str, todo: str) -> None:
    """Raise UserError, without seconds of imports, where a command has nothing to read."""
    if not path.startswith("hf:") and not Path(path).exists():
        raise UserError(field, f"there is no folder {path}", todo)


def written(out: str, write: Callable[[], int]) -> int:
    """Call ``write`` and return its status; report a bad path or a failing disk in a line (`ExitStatus.STORAGE`)."""
    try:
        return write()
    except OSError as error:
        refused = path_line(error)
        if refused is not None and refused[0] == ExitStatus.USAGE:  # the path is wrong, not the disk
            say(refused[1])
        else:
            say(f"{out}: it was not written ({error.strerror or error}); free space, or name another folder")
        return ExitStatus.STORAGE


def look_at_checkpoints(config: None, words: Sequence[str]) -> int:
    """Run `zeroshard checkpoint`: prints the output of `zeroshard.cli.checkpoints`."""
    from zeroshard.cli.checkpoints import run_checkpoint

    return run_checkpoint(words)


def import_config(config: None, words: Sequence[str]) -> int:
    """Run `zeroshard import-config`: prints DeepSpeed's settings as ours."""
    from zeroshard.integrations.deepspeed import run_import_config

    return run_import_config(words)


def submit(config: SubmitConfig, argv: Sequence[str]) -> int:
    """Run `zeroshard submit`: checks the run's settings, and queues it as a job on a cluster."""
    from zeroshard.cli.submit import submit

    words = list(argv[1:])
    path, flags = take_option(words, "--config")
    run = checked_settings(TrainConfig, read_file(path, TrainConfig) if path else {}, flags, path)
    if run.nproc or run.nnodes != "1":
        raise UserError("nproc", "ranks are the cluster's to start", "say --nproc 0, and give submit --tasks-per-node")
    if run.resume == "none":
        words += ["--resume", "auto"]
    print(submit(config, words))
    return ExitStatus.OK
