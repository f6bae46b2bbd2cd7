"""Pieces of `benchmarks/gpu_day.py` about a step: products in 8 bits, a step as a CUDA graph, hidden collectives."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from gpu_setup import (
    DEVICE,
    MAIN_MODEL,
    ON_GPU,
    Result,
    SkippedError,
    autocast_step,
    model_of,
    plain_step,
    seconds_in_rounds,
)
from torch import Tensor

from zeroshard.comm import CONTROL, LocalCommunicator, NullCommunicator, current_scope
from zeroshard.comm.base import DONE, ReduceOp, Work
from zeroshard.errors import UserError
from zeroshard.lab.bench.ranks import synchronise
from zeroshard.lab.bench.report import spread_of
from zeroshard.models.float8 import require_float8
from zeroshard.zero import STAGES, MixedPrecision, Zero

ROUNDS, STEPS = (7, 10) if ON_GPU else (2, 1)


def in_rounds(functions: Mapping[str, Callable[[], object]], num_calls: int = STEPS) -> dict[str, dict[str, Any]]:
    """The spread of the seconds of a call of each."""
    return {name: spread_of(seen) for name, seen in seconds_in_rounds(functions, ROUNDS, num_calls).items()}


# ---------------------------------------------------------------------------------------------- products in 8 bits

SHAPES = {  # tokens x inputs x outputs
    "gpt2-124m c_fc": (16384, 768, 3072),
    "gpt2-1.5b c_fc": (8192, 1600, 6400),
    "llama-1b down": (8192, 8192, 2048),
    "llama-8b gate": (8192, 4096, 14336),
}
TOY_SHAPES = {"toy": (32, 16, 48)}


def _scaled(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What torchao does before a product with tensorwise scales: the numbers in 8 bits, and their inverse scale."""
    scale = torch.finfo(dtype).max / tensor.abs().max().float().clamp(min=1e-12)
    return (tensor.float() * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype), 1 / scale


def _product_8(left: Tensor, right_t: Tensor) -> Tensor:
    """``left @ right_t.T``, both rounded to e4m3 first."""
    (a, a_scale), (b, b_scale) = (_scaled(each, torch.float8_e4m3fn) for each in (left, right_t))
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def float8(out: Path) -> Result:
    """A product in bf16 and in 8 bits: alone, with its casts, and with compiled ones; errors against fp32."""
    if ON_GPU:
        try:
            require_float8(DEVICE, package=False)
        except UserError as reason:
            raise SkippedError(str(reason)) from None
    rows = []
    for name, (tokens, inputs, outputs) in (SHAPES if ON_GPU else TOY_SHAPES).items():
        generator = torch.Generator(DEVICE).manual_seed(0)
        x, w = (torch.randn(size, inputs, device=DEVICE, generator=generator).bfloat16() for size in (tokens, outputs))
        (a, a_scale), (b, b_scale) = (_scaled(each, torch.float8_e4m3fn) for each in (x, w))
        functions: dict[str, Callable[[], Tensor]] = {
            "bf16": lambda x=x, w=w: x @ w.t(),
            "fp8, already cast": lambda a=a, b=b, s=a_scale, t=b_scale: torch._scaled_mm(
                a, b.t(), scale_a=s, scale_b=t, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            "fp8, eager casts": lambda x=x, w=w: _product_8(x, w),
        }
        if ON_GPU:
            compiled = torch.compile(_product_8)
            functions["fp8, compiled casts"] = lambda x=x, w=w, run=compiled: run(x, w)
        exact = x.float() @ w.float().t()
        errors = {each: float((run().float() - exact).norm() / exact.norm()) for each, run in functions.items()}
        seconds = in_rounds(functions)
        flops = 2 * tokens * inputs * outputs
        rows += [
            {
                "product": name,
                "shape": f"{tokens} x {inputs} x {outputs}",
                "how": each,
                "time_s": seconds[each],
                "flops_per_s": flops / seconds[each]["median"],
                "of_bf16": seconds[each]["median"] / seconds["bf16"]["median"],
                "error": errors[each],
            }
            for each in functions
        ]
    return {"rows": rows}


# --------------------------------------------------------------------------------------------- a step as a CUDA graph


def _graph_step(name: int | str, rows: int) -> Callable[[], Tensor]:
    """A step of plain PyTorch, or of the engine at a stage in a world of one, that reads nothing on the host."""
    model = model_of()
    how: dict[str, Any] = {"lr": torch.tensor(3e-4, device=DEVICE), "capturable": True} if ON_GPU else {"lr": 3e-4}
    if name == "plain":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True, **how)
    else:
        zero = Zero(model, int(name), units=model.units, comm=LocalCommunicator())
        optimizer = zero.optimizer(torch.optim.AdamW, fused=True, **how)
    return autocast_step(model, optimizer, rows, cache_enabled=False)


def _captured(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What replays a step, and where it leaves the loss. The steps before run on another stream, as capturing wants."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph.replay, loss


def graphs(out: Path) -> Result:
    """A whole step, launched kernel by kernel and as one CUDA graph; a step that cannot be captured has its error."""
    found: Result = {}
    rows = 8 if ON_GPU else 1
    for name in ("plain", *STAGES):
        eager = _graph_step(name, rows)
        losses = [float(eager()) for _ in range(5)]
        each: Result = {"eager_s": in_rounds({"eager": eager})["eager"], "graph_s": None, "same_loss": None}
        del eager
        if ON_GPU:
            try:
                replay, loss = _captured(_graph_step(name, rows))
                replay()  # the fourth step: nothing ran while the graph was made
                again = float(loss)
                replay()
                each["same_loss"] = [again, float(loss)] == losses[3:5]
                each["graph_s"] = in_rounds({"graph": replay})["graph"]
                del replay, loss
            except RuntimeError as error:
                each["error"] = str(error).splitlines()[0]
        found[name if name == "plain" else f"zero{name}"] = each
    return {"model": MAIN_MODEL, "contestants": found}


# --------------------------------------------------------------------------------------------- hidden collectives


class CopyingCommunicator(NullCommunicator):
    """Peers whose collectives take as long as copies on the device do: ``times`` the bytes of each, twice a sum's."""

    def __init__(self, world_size: int, times: int) -> None:
        super().__init__(world_size)
        self._times = times
        self._scratch: dict[int, Tensor] = {}
        self.num_bytes = 0

    def _copies(self, tensor: Tensor, times: int = 1) -> Work:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        self.num_bytes += times * flat.numel()
        scratch = self._scratch.setdefault(flat.numel(), torch.empty_like(flat))
        for _ in range(times * self._times):
            scratch.copy_(flat)
        return DONE

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """As the base class, and copies; a message that the host reads is none of the device's."""
        super().all_reduce(tensor, op)
        return DONE if current_scope() == CONTROL else self._copies(tensor, 2)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """As the base class, and copies."""
        super().all_gather(output, input)
        return self._copies(output)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """As the base class, and copies."""
        output.view(-1).copy_(input.reshape(self.world_size, -1)[self.rank])
        super().all_reduce(output, op)
        return self._copies(input)


def _overlap_step(stage: int, comm: NullCommunicator) -> Callable[[], None]:
    model = model_of()
    zero = Zero(model, stage, units=model.units, comm=comm, precision=MixedPrecision(param_dtype=torch.bfloat16))
    return plain_step(model, zero.optimizer(torch.optim.AdamW, lr=3e-4, fused=True), 8 if ON_GPU else 1)


def overlap(out: Path, world: int) -> Result:
    """How much of collectives a step hides, where copies on the device stand for them; and a trace of one step."""
    times = 8 if ON_GPU else 1  # an H200 copies 8 to 10 times as fast as NVLink sends
    found = {}
    for stage in STAGES:
        comm = CopyingCommunicator(world, times)
        alone, beside = _overlap_step(stage, NullCommunicator(world)), _overlap_step(stage, comm)
        beside()
        comm.num_bytes = 0
        beside()
        num_bytes = comm.num_bytes
        block = torch.zeros(max(num_bytes // 16, 1), dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(block)

        def copies(block: Tensor = block, target: Tensor = target) -> None:
            for _ in range(16 * times):
                target.copy_(block)

        seconds = in_rounds({"alone": alone, "beside": beside, "copies": copies})
        exposed = seconds["beside"]["median"] - seconds["alone"]["median"]
        found[f"zero{stage}"] = {
            **{f"{name}_s": each for name, each in seconds.items()},
            "num_bytes": num_bytes,
            "hidden_share": 1 - exposed / seconds["copies"]["median"] if num_bytes else None,
            "trace": _traced(beside, out / f"overlap-zero{stage}.trace.json.gz"),
        }
        del alone, beside, comm, block, target, copies
        if ON_GPU:
            torch.cuda.empty_cache()
    return {"model": MAIN_MODEL, "world": world, "times": times, "stages": found}


def _traced(step: Callable[[], None], path: Path) -> str:
    """The name of a file with a step's trace, for chrome://tracing or ui.perfetto.dev."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with torch.cuda.device(DEVICE) if ON_GPU else nullcontext(), profile(activities=activities) as seen:
        step()
        synchronise(DEVICE)
    whole = path.with_suffix("")
    seen.export_chrome_trace(str(whole))
    path.write_bytes(gzip.compress(whole.read_bytes()))
    whole.unlink()
    return path.name
