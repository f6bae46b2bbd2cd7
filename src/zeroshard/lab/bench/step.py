"""Time of one training step: our stages compared with a plain loop and torch's DDP.

Every contestant trains its own copy of the same model on the same data in the same processes. A round takes a few steps
with each; ratios to the first contestant are taken within each round. No contestant clips gradients; all use the same
fused AdamW and have large tensors in huge pages, as the trainer does. ``plain`` communicates nothing: it is the lower
bound for DDP. The report has wall time, and CPU time of the process including its communication threads.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.comm import Communicator
from zeroshard.comm.registry import COMMUNICATORS
from zeroshard.host import gc_frequency
from zeroshard.host.errors import UserError
from zeroshard.lab.bench.ranks import chosen_device, close, communicator, on_ranks, synchronise
from zeroshard.lab.bench.report import Column, Report, Row, Spread, milliseconds, spread_of
from zeroshard.lab.bench.settings import StepBench
from zeroshard.models import LanguageModel, build_model
from zeroshard.zero import STAGES, Offload, Zero


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT-2 model, and of a rank's batch."""

    n_embd: int
    n_layer: int
    n_head: int
    vocab_size: int
    seq_len: int
    batch: int


SHAPES = {
    "wide": Shape(512, 8, 8, 8192, 128, 1),  # 29.5 M parameters, few tokens: heavy in communication
    "deep": Shape(384, 6, 6, 4096, 128, 4),  # 12.3 M parameters, more tokens: heavy in computation
    "small": Shape(192, 4, 4, 1024, 128, 4),  # 2.0 M parameters
    "tiny": Shape(64, 2, 2, 256, 64, 1),  # 0.12 M parameters: pure overhead
}
Times = tuple[float, float]  # seconds of wall and of CPU time


@dataclass
class Contestant:
    """A model with its optimizer; ``forward`` is the module that is called (DDP's wrapper, or the model)."""

    model: nn.Module
    forward: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer


class Named(NamedTuple):
    """What a contestant's name says; ``comm`` may be empty."""

    kind: str
    comm: str = ""
    is_reproducible: bool = False
    is_offloaded: bool = False


def parse_contestant(name: str) -> Named:
    """What ``plain``, ``ddp``, ``zero1+offload`` or ``zero2@ring+reproducible`` says.

    Raises:
        UserError: the name has another form, or there is no such stage or communicator.
    """
    zero = rf"(zero[{''.join(map(str, STAGES))}])(?:@({'|'.join(COMMUNICATORS)}))?(\+reproducible)?(\+offload)?"
    found = re.fullmatch(f"{zero}|(plain|ddp)", name)
    if found is None:
        todo = "write plain, ddp, zero2, zero2@ring, zero2@ring+reproducible, or zero2+offload"
        raise UserError("contestants", f"{name!r} is unknown", todo)
    return Named(found[1] or found[5], found[2] or "", bool(found[3]), bool(found[4]))


def make_model(shape: Shape, device: torch.device | str) -> LanguageModel:
    """Build the model of ``shape`` on ``device``."""
    sizes = {"n_embd": shape.n_embd, "n_layer": shape.n_layer, "n_head": shape.n_head}
    with torch.device(device):
        return build_model("gpt2-demo", vocab_size=shape.vocab_size, seq_len=shape.seq_len, overrides=sizes)


def build(name: str, shape: Shape, comms: Mapping[str, Communicator], device: torch.device) -> Contestant:
    """Build the contestant ``name``; ``comms``: communicators by the name after the ``@`` ("" if there is none)."""
    model = make_model(shape, device)
    kind, comm, is_reproducible, is_offloaded = parse_contestant(name)
    if kind.startswith("zero"):
        reproducible = comms[comm].world_size if is_reproducible else None
        offload = Offload(grads="device" if is_reproducible else "host") if is_offloaded else None
        stage, units = int(kind[-1]), model.units
        zero = Zero(model, stage, units=units, comm=comms[comm], reproducible=reproducible, offload=offload)
        return Contestant(model, model, zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True))
    wrapped: nn.Module = model
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Contestant(model, wrapped, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def batch(shape: Shape, rank: int, device: torch.device) -> list[Tensor]:
    """Random tokens and targets of a rank, ``[batch, seq_len]`` each."""
    generator = torch.Generator().manual_seed(rank)
    size = (shape.batch, shape.seq_len)
    return [torch.randint(0, shape.vocab_size, size, generator=generator).to(device) for _ in range(2)]


def once(contestant: Contestant, tokens: Tensor, targets: Tensor) -> None:
    """Take one step, untimed."""
    contestant.forward(tokens, targets).backward()
    contestant.optimizer.step()
    contestant.optimizer.zero_grad()


def take(contestant: Contestant, tokens: Tensor, targets: Tensor) -> Times:
    """Take one step, timed from a common barrier."""
    if dist.is_initialized():
        dist.barrier()
    synchronise(tokens.device)
    wall, cpu = time.perf_counter(), time.process_time()
    once(contestant, tokens, targets)
    synchronise(tokens.device)
    return time.perf_counter() - wall, time.process_time() - cpu


def run(settings: StepBench) -> Report:
    """Measure all contestants on each shape; ratios are relative to the first of them.

    Raises:
        UserError: a contestant is unknown or needs several ranks, or the device is not there.
    """
    for name in settings.contestants:
        if parse_contestant(name).kind == "ddp" and settings.nproc == 1:
            raise UserError("contestants", "ddp needs several ranks", "use plain, or --nproc 2")
    world, device, num_threads = settings.nproc, chosen_device(settings.device, settings.nproc), settings.threads
    names = list(settings.contestants) or ["plain" if world == 1 else "ddp", *(f"zero{stage}" for stage in STAGES)]
    rows: list[Row] = []
    for shape in settings.shapes:
        args = (SHAPES[shape], names, settings.rounds, settings.steps, settings.comm)
        rounds = on_ranks(measure, world, *args, device=device, num_threads=num_threads)
        rows += [{"shape": shape, "world": world, **row} for row in rows_of(rounds, names)]
    columns = [
        Column("shape", "model"),
        Column("name", ""),
        Column("wall_s", "wall ms", milliseconds),
        Column("ratio", f"/ {names[0]}", _ratio),
        Column("cpu_s", "cpu ms", milliseconds),
        Column("cpu_ratio", f"/ {names[0]}", _ratio),
    ]
    shapes = {shape: asdict(SHAPES[shape]) for shape in settings.shapes}
    facts = {"shapes": shapes, "world": world, "comm": settings.comm}
    return Report("step", rows, columns, facts | {"device": device, "num_threads": num_threads})


def measure(
    rank: int,
    device: torch.device,
    shape: Shape,
    names: Sequence[str],
    num_rounds: int,
    num_steps: int,
    default_comm: str,
) -> list[dict[str, Times]]:
    """Median times of each contestant in each round, on this rank."""
    comms = {
        comm: communicator(comm or default_comm) for comm in sorted({parse_contestant(name).comm for name in names})
    }
    contestants = {name: build(name, shape, comms, device) for name in names}
    tokens, targets = batch(shape, rank, device)
    rounds: list[dict[str, Times]] = []
    order = random.Random(0)  # the same on every rank
    for _ in range(num_rounds + 1):
        seen = {}
        for name in order.sample(list(names), len(names)):
            times = [take(contestants[name], tokens, targets) for _ in range(num_steps + 1)][1:]
            wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            seen[name] = (wall, cpu)
        rounds.append(seen)
        gc_frequency.freeze()  # as the trainer does: the collector ignores the objects that live already
    gc_frequency.unfreeze()
    del contestants
    for comm in comms.values():
        close(comm)
    return rounds[1:]


def rows_of(rounds: Sequence[Mapping[str, Times]], names: Sequence[str]) -> list[Row]:
    """A row for each contestant; ratios to the first contestant are taken within each round."""
    base = names[0]
    rows: list[Row] = []
    for name in names:
        wall, cpu = ([each[name][kind] for each in rounds] for kind in (0, 1))
        ratios = [spread_of([r[name][kind] / r[base][kind] for r in rounds]) for kind in (0, 1)]
        row = {"name": name, "wall_s": spread_of(wall), "ratio": ratios[0], "cpu_s": spread_of(cpu)}
        rows.append({**row, "cpu_ratio": ratios[1], "rounds_wall_s": wall})
    return rows


def _ratio(value: Mapping[str, Any]) -> str:
    spread = Spread(**value)
    return f"{spread.median:.3f} ({spread.low:.3f}-{spread.high:.3f})"
