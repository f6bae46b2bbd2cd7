"""Pieces of `benchmarks/gpu_day.py` with several ranks: two on one GPU over gloo, and one on each of several GPUs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_setup import ON_GPU, Result, SkippedError, batch_of, model_of
from torch import nn

from zeroshard.comm import Communicator, LocalCommunicator, TorchCommunicator
from zeroshard.lab.bench.report import spread_of
from zeroshard.launch import environment
from zeroshard.parallel import STRATEGIES
from zeroshard.zero import STAGES, MixedPrecision, Zero


def _digest(model: nn.Module, zero: Zero) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(zero.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _train_stages(comm: Communicator, rank: int, precision: MixedPrecision | None) -> dict[str, str]:
    """sha256 of the weights after three steps, by stage."""
    found = {}
    for stage in STAGES:
        model = model_of("gpt2-demo")
        zero = Zero(model, stage, units=model.units, comm=comm, precision=precision)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-3)
        tokens, targets = batch_of(2, seed=rank)
        for _ in range(3):
            model(tokens, targets).backward()
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found[str(stage)] = _digest(model, zero)
        zero.remove()
    return found


def _train_leaves(comm: Communicator) -> dict[str, str]:
    """sha256 of the weights after three steps of two micro-batches: by two ranks, and by this one alone."""
    environment.use_deterministic_cublas()
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, among, stage in (("0", comm, 0), ("3", comm, 3), ("alone", LocalCommunicator(), 1)):
        model = model_of("gpt2-demo")
        zero = Zero(model, stage, units=model.units, comm=among, leaves=2)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-3)
        leaves = range(among.rank, 2, among.world_size)
        for _ in range(3):
            for leaf in leaves:
                tokens, targets = batch_of(2, seed=leaf)
                (model(tokens, targets) / len(leaves)).backward()
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = _digest(model, zero)
        zero.remove()
    return found


def _two_ranks_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    comm = TorchCommunicator()
    policies = {"fp32": None, "bf16": MixedPrecision(param_dtype=torch.bfloat16)}
    found = {name: _train_stages(comm, rank, policy) for name, policy in policies.items()}
    found["fp32 on one rank and on two"] = _train_leaves(comm)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(out: Path) -> Result:
    """Two ranks on one device over gloo: stages are to have the same bits; with leaves, one rank alone has them too."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_two_ranks_main, args=(folder,), nprocs=2, start_method="spawn")
        by_rank = [json.loads(Path(folder, f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    same = {policy: len({digest for rank in by_rank for digest in rank[policy].values()}) == 1 for policy in by_rank[0]}
    return {"same_bits": same, "digests": by_rank[0]}


def strategies(out: Path, world: int) -> Result:
    """Every data-parallel strategy by the trainer, one after the other: tokens a second on ``world`` GPUs."""
    if ON_GPU and torch.cuda.device_count() < world:
        raise SkippedError(f"{world} GPUs are asked for and {torch.cuda.device_count()} are here")
    if not ON_GPU:
        raise SkippedError("there is no GPU")
    return {"world": world, "strategies": {name: _by_trainer(out, name, world) for name in STRATEGIES}}


def _by_trainer(out: Path, strategy: str, world: int) -> Result:
    """Tokens a second of 30 steps of `zeroshard train`, or the last words of a run that failed."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        words = f"""train --data synthetic --data.dir {scratch}/data --out {scratch}/run --model gpt2-350m
            --strategy {strategy} --nproc {world} --dtype bfloat16 --seq-len 1024 --micro-batch-size 8 --max-steps 40
            --eval-interval 0 --eval-batches 1 --warmup-steps 5""".split()
        done = subprocess.run([sys.executable, "-m", "zeroshard", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": done.stderr[-500:]}
        lines = Path(scratch, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [event["tokens_per_s"] for event in map(json.loads, lines) if event["event"] == "step"]
    return {"tokens_per_s": spread_of(rates[10:])}
