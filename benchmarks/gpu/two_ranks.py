"""Two ranks on one device over gloo, which NCCL refuses: do all stages compute the same bits?"""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import rows
import torch
import torch.distributed as dist

from zeroshard.comm import Communicator, LocalCommunicator, TorchCommunicator
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero

MAX_NORM = 0.1  # it clips


def digests_of_two_ranks() -> dict[str, dict[str, str]]:
    """By case: sha256 of the weights after three clipped steps of two micro-batches, by stage or kind of world."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, __file__, str(rank), folder]) for rank in range(2)]
        ends = [rank.wait() for rank in ranks]
        if any(ends):
            raise RuntimeError(f"ranks ended with statuses {ends}; their words are above")
        one, other = (json.loads(Path(folder, f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    return {case: {**one[case], **{f"{kind} on rank 1": found for kind, found in other[case].items()}} for case in one}


def _main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    comm = TorchCommunicator()
    found = {name: _by_stage(comm, policy) for name, policy in (("fp32", None), ("bf16", rows.BF16))}
    found["and one rank alone, reproducible"] = {
        "stage 0": _digest(comm, 0, None, reproducible=2),
        "stage 3": _digest(comm, 3, None, reproducible=2),
        "alone": _digest(LocalCommunicator(), 1, None, reproducible=2),
    }
    # Between a GPU's update and a CPU's bits may differ; all of these update on the CPU.
    for name, policy in (("fp32", None), ("bf16", rows.BF16)):
        found[f"{name}, state off the device"] = {
            f"{where}, stage {stage}": _digest(comm, stage, policy, offload=offload)
            for where, offload in _places(folder).items()
            for stage in ((3,) if offload.weights != "device" else STAGES)
        }
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def _places(folder: str) -> dict[str, Offload]:
    on_disk = Offload("disk", "disk", "disk", path=folder)
    return {
        "host": Offload(),
        "host, weights too": Offload(weights="host"),
        "host, few pinned": Offload(pinned="6MiB"),
        "disk": on_disk,
        "disk, weights too": replace(on_disk, weights="disk"),
    }


def _by_stage(comm: Communicator, precision: MixedPrecision | None) -> dict[str, str]:
    return {f"stage {stage}": _digest(comm, stage, precision) for stage in STAGES}


def _digest(
    comm: Communicator,
    stage: int,
    precision: MixedPrecision | None,
    reproducible: int | None = None,
    offload: Offload | None = None,
) -> str:
    model = rows.gpt2("gpt2-demo", kernels="reference")
    # "local" at each stage: micro-batches added after their reduction would round otherwise.
    accumulate = "local" if reproducible is None else None
    zero = Zero(
        model,
        stage,
        units=model.units,
        comm=comm,
        precision=precision,
        accumulate=accumulate,
        reproducible=reproducible,
        offload=offload,
    )
    optimizer = zero.optimizer(torch.optim.AdamW, **rows.ADAMW)
    for step in range(3):
        micro_batches = list(_seeds(comm, step, reproducible))
        for last, seed in micro_batches:
            tokens, targets = rows.batch(2, seed=seed)
            with zero.micro_batch(last):
                (model(tokens, targets) / len(micro_batches)).backward()
        zero.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for name, tensor in sorted(zero.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    zero.remove()
    return digest.hexdigest()


def _seeds(comm: Communicator, step: int, reproducible: int | None) -> Iterator[tuple[bool, int]]:
    """(is it the last, seed) of this rank's micro-batches: two, or its share of ``reproducible``."""
    num = 2 * comm.world_size if reproducible is None else reproducible
    own = range(comm.rank, num, comm.world_size)
    for micro in own:
        yield micro == own[-1], 100 * step + micro


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
