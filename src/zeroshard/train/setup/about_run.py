"""Describes a run in words: the first lines that it prints, and the command that its last line names.

Each line answers one question of the user who starts a run: what is sharded over which ranks, how they communicate,
which model is trained on which data, and what a step consists of.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
import torch.distributed as dist

from zeroshard.comm import Communicator
from zeroshard.data.registry import source_entry
from zeroshard.models import LanguageModel
from zeroshard.optim.muon import multiplies_bfloat16
from zeroshard.parallel import strategy_entry
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.run import Run
from zeroshard.train.setup.compiled import compiled_in_words
from zeroshard.train.setup.products_in_8_bits import products_in_8_bits_in_words
from zeroshard.zero import STAGES
from zeroshard.zero.offload.probe import compare_updates

_TORCH_STRATEGIES = {
    "ddp": "PyTorch's DistributedDataParallel",
    "zero1-torch": "PyTorch's ZeroRedundancyOptimizer",
    "fsdp2": "PyTorch's fully_shard (FSDP2)",
}
# Keyed by class name, so that no communicator has to be imported for a comparison.
_COMMUNICATORS = {
    "LocalCommunicator": "none, one rank has no collectives",
    "SharedMemoryCommunicator": "shm, shared memory of this machine",
    "RingCommunicator": "ring, over TCP sockets",
}
_KINDS = (("optim", "optimizer states"), ("grads", "gradients"), ("params", "parameters"))


def about_run(run: Run, config: TrainConfig, model: LanguageModel, why_fraction: str) -> dict[str, str]:
    """Return the lines that describe a run, by label, in the order in which they are printed.

    ``config`` has a resolved strategy, not ``auto``. ``model`` is the unsharded one, and may be on the meta device.
    ``why_fraction``: why ``--offload.fraction auto`` is what it is.
    """
    comm, corpus, accum, every = run.strategy.comm, run.corpus, run.schedule.grad_accum_steps, config.local_steps.every
    micro_batches = "1 micro-batch" if accum == 1 else f"{accum:,} micro-batches"
    resumed = f", resumed after step {run.first_step:,}" if run.first_step else ""
    sizes = {"over": config.ranks_that_shard(comm.world_size), "every": every}
    most = config.reproducible
    alike = f", with the same bits on any number up to {most}" if most else ""
    num_groups = config.num_groups(comm.world_size)
    groups = _groups(num_groups, comm.world_size // num_groups) if config.shares_sequences else _ranks(comm.world_size)
    size = f"{corpus.num_tokens:,} tokens to train on" if corpus.num_tokens else "streamed"
    rows = f", {corpus.said}" if corpus.said else ""
    num_params = sum(param.numel() for param in model.parameters())
    num_trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    adapters = f", of which {num_trained:,} of adapters are trained" if model.lora is not None else ""
    lines = {
        "run": f"{run.folder}, {config.max_steps:,} step{'s' if config.max_steps > 1 else ''}{resumed}",
        "strategy": strategy_in_words(config.strategy, comm.world_size, **sizes) + alike,
        "offload": offload_in_words(config, why_fraction, comm.world_size),
        "update": update_in_words(config, run),
        "comm": communicator_in_words(comm, config.strategy),
        "model": f"{config.model.name}, {num_params:,} parameters{adapters}",
        "data": f"{config.data.source}, {size}, tokenizer {config.data.tokenizer} of {corpus.vocab_size:,} ids{rows}",
        "batch": f"{config.micro_batch_size:,} sequences x {micro_batches} x {groups} x "
        f"{config.seq_len:,} tokens = {run.tokens_per_step:,} tokens a step",
        "compute": f"{config.dtype} on {run.device}{products_in_words(config.dtype, run.device)}, {config.optimizer} "
        f"with lr {config.lr:g}, torch {torch.__version__}",
        "compile": compiled_in_words(config, run.device, comm.world_size, len(model.blocks)),
        "matmul": products_in_8_bits_in_words(model, config, run.device),
    }
    return {label: said for label, said in lines.items() if said}


def next_command(config: TrainConfig, folder: Path) -> str:
    """The command that shows what a finished run has learned, or how it went if its tokens are no text."""
    is_text = source_entry(config.data.source).has_text or config.data.streaming
    return shlex.join(["zeroshard", "generate" if is_text else "report", str(folder)])


def strategy_in_words(name: str, world_size: int, *, over: int, every: int = 1) -> str:
    """Describe a strategy, as ``zero2: optimizer states and gradients sharded over 2 ranks``.

    ``over``: the number of ranks over which training state is sharded. ``every``: local steps for each outer step.
    """
    if name in _TORCH_STRATEGIES:
        said = f"{name}: {_TORCH_STRATEGIES[name]},"
    elif strategy_entry(name).planned:
        said = f"{name}:"
    else:
        return f"{name} on {_ranks(world_size)}"
    if world_size == 1:
        return f"{said} one rank, which keeps all training state"
    row = STAGES[strategy_entry(name).stage]
    sharded = [words for column, words in _KINDS if getattr(row, column).value == "shard"]
    if not sharded and every == 1:
        return f"{said} all training state replicated on {_ranks(world_size)}"
    sharded = sharded or ["global weights"]
    kinds = " and ".join([", ".join(sharded[:-1]), sharded[-1]] if sharded[1:] else sharded)
    copies = f", in {world_size // over} replicas" if over < world_size else ""
    copies += f" that synchronise every {every:,} steps" if every > 1 else ""
    return f"{said} {kinds} sharded over {_ranks(over)}{copies}"


_AWAY = {  # by ``offload.state``
    "optimizer": "optimizer states, master weights and gradients on the host",
    "all": "optimizer states, master weights and gradients on the host",
    "disk": "optimizer states and master weights in a file of each rank, gradients on the host",
    "disk-all": "optimizer states, master weights and gradients in a file of each rank",
}
_STREAMED = {"all": ", weights copied up for each use", "disk-all": ", weights read there for each use"}


def offload_in_words(config: TrainConfig, why: str, world_size: int) -> str:
    """Describe what is off the device, and which part of it for which reason ``why``; empty if nothing is."""
    offload = config.offload
    if not offload.on:
        return f"none (auto: {why})" if why else ""
    chosen = f", auto: {why}" if why else ""
    share = "all" if offload.share in ("auto", 1.0) else f"--offload.fraction {offload.fraction}"
    streams = config.strategy == "zero3" and (config.ranks_that_shard(world_size) > 1 or world_size == 1)
    weights = _STREAMED.get(offload.state, "") if streams else ""
    return f"{_AWAY[offload.state]}{weights} ({share}{chosen})"


def update_in_words(config: TrainConfig, run: Run) -> str:
    """Say whether updates on the host have the bits of updates on the device; empty if nothing is off the device."""
    if not config.offload.on:
        return ""
    try:
        return str(compare_updates(run.strategy.optimizer, run.device)).removeprefix("update ")
    except (TypeError, ValueError) as error:  # a class that takes parameters of certain shapes or names alone
        return f"on the host, not compared with the device's: {error}"


def products_in_words(dtype: str, device: torch.device) -> str:
    """What a user who did not expect so slow a run should know of its matrix products; else nothing."""
    if dtype != "bfloat16" or multiplies_bfloat16(device):
        return ""
    return ", for which this CPU has no instructions (float32 is many times faster)"


def communicator_in_words(comm: Communicator, strategy: str) -> str:
    """Describe the innermost communicator of a run, without its wrappers; torch.distributed with its backend."""
    inner = comm
    while hasattr(inner, "inner"):
        inner = inner.inner
    name = type(inner).__name__
    if strategy_entry(strategy).over_torch or name == "TorchCommunicator":
        return f"torch, torch.distributed with {dist.get_backend()}" if dist.is_initialized() else "torch"
    return _COMMUNICATORS.get(name, name)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"


def _groups(count: int, size: int) -> str:
    return f"{count:,} group{'s' if count > 1 else ''} of {_ranks(size)} that share them"
