"""A step of a rank of 8 whose collectives are copies on the device: how much is hidden, and a trace of one step."""

from __future__ import annotations

import gc
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import rows
import torch
from torch import Tensor

from zeroshard.comm import CONTROL, NullCommunicator, current_label
from zeroshard.comm.base import DONE, ReduceOp, Work
from zeroshard.zero import Zero

TIMES = 7  # an H100 copies seven times as fast as its NVLink sends
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class CopyingCommunicator(NullCommunicator):
    """Peers whose collectives take as long as ``times`` copies of their bytes on the device, twice a sum's."""

    def __init__(self, world_size: int, times: int) -> None:
        super().__init__(world_size)
        self._times = times
        self._scratch: dict[tuple[int, torch.device], Tensor] = {}

    def _copies(self, tensor: Tensor, times: int = 1) -> Work:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        scratch = self._scratch.setdefault((flat.numel(), flat.device), torch.empty_like(flat))
        for _ in range(times * self._times):
            scratch.copy_(flat)
        return DONE

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """As the base class, and copies; a message that the host reads is none of the device's."""
        super().all_reduce(tensor, op)
        return DONE if current_label() == CONTROL else self._copies(tensor, 2)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """As the base class, and copies."""
        super().all_gather(output, input)
        return self._copies(output)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """As the base class, and copies."""
        output.view(-1).copy_(input.reshape(self.world_size, -1)[self.rank])
        super().all_reduce(output, op)
        return self._copies(input)


def measured(stage: int, path: Path) -> dict[str, Any]:
    """Seconds of a step with copies, without, and of FSDP2's; until Python has queued each; facts of a trace."""
    micro = 1 if rows.TOY else 16
    with ExitStack() as stack:
        steps = {
            "copies": _step(stage, CopyingCommunicator(8, TIMES), micro),
            "none": _step(stage, NullCommunicator(8), micro),
        }
        if stage > 1:  # FSDP2 has no stage 1
            stack.enter_context(_absent_peers())
            steps["fsdp2"] = _fsdp2_step(stage == 3, micro)
        medians = _medians(steps)
    return {**medians, "tokens": micro * rows.SEQ_LEN, **facts_of_trace(trace_of(steps["copies"], path))}


def _medians(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for _ in range(8 if rows.ON_GPU else 2):
        for name, step in steps.items():
            rows.synchronise()
            began = time.perf_counter()
            step()
            seconds.setdefault(f"{name}_queued_s", []).append(time.perf_counter() - began)
            rows.synchronise()
            seconds.setdefault(f"{name}_s", []).append(time.perf_counter() - began)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}  # the first warms up


@contextmanager
def _absent_peers() -> Generator[None]:
    """torch's process group of a rank of 8 whose collectives send nothing, as our `NullCommunicator`'s."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def _fsdp2_step(reshard_after_forward: bool, micro: int) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = rows.gpt2()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(rows.DEVICE.type, (8,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.AdamW(model.parameters(), **rows.ADAMW, fused=True)
    tokens, targets = rows.batch(micro)

    def step() -> None:
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _step(stage: int, comm: NullCommunicator, micro: int) -> Callable[[], None]:
    model = rows.gpt2()
    zero = Zero(model, stage, units=model.units, comm=comm, precision=rows.BF16)
    optimizer = zero.optimizer(torch.optim.AdamW, **rows.ADAMW, fused=True)
    tokens, targets = rows.batch(micro)

    def step() -> None:
        model(tokens, targets).backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trace_of(step: Callable[[], object], path: Path) -> list[dict[str, Any]]:
    """The events of one step's trace, which is left at ``path`` for ui.perfetto.dev."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if rows.ON_GPU else [])]) as seen:
        step()
        rows.synchronise()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "trace.json")
        seen.export_chrome_trace(str(written))
        content = written.read_bytes()
    path.write_bytes(gzip.compress(content))
    return json.loads(content)["traceEvents"]


def facts_of_trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The idle share of the busiest stream, from its first kernel to its last, and the host's waits in mid-step.

    What is waited for after the last launch is the end of the step.
    """
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_stream: dict[int, list[tuple[float, float]]] = {}
    for event in on_device:
        by_stream.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    busy = {stream: _union(spans) for stream, spans in by_stream.items()}
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    last_launch = max((e["ts"] for e in calls if "Launch" in e["name"]), default=0)
    num_waits = sum(e["name"] in WAITS and e["ts"] < last_launch for e in calls)
    reads = [e["name"] for e in on_device if "DtoH" in e["name"]]
    if not busy:
        return {"idle_share": None, "num_host_waits": num_waits, "num_reads": len(reads)}
    compute = max(busy, key=lambda stream: busy[stream])
    whole = max(end for _, end in by_stream[compute]) - min(start for start, _ in by_stream[compute])
    return {"idle_share": 1 - busy[compute] / whole, "num_streams": len(busy), "num_kernels": len(on_device),
            "num_host_waits": num_waits, "num_reads": len(reads)}  # fmt: skip


def _union(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
