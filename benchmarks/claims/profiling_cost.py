"""What measuring costs: a step bare, with what every run measures, and with each thing that may be asked for.

    python benchmarks/claims/profiling_cost.py --json cost.json

One rank of a world of two without a peer (`NullCommunicator`), so that nothing but the engine, the model and what
watches them is timed. A round takes a step with each contestant in a shuffled order; costs are medians of ratios round
by round. Contestants are built anew several times: where a model's memory happens to lie is worth a percent.

    bare        the engine's own communicator, no clock
    off         as a run is by default: collectives counted, exposed communication, spans, the plan compared
    on          and each collective timed to its end, hidden and exposed added up (`--profile.overlap`)
    trace       in a step that torch's profiler records (`--profile.trace-steps`), with the units' names
    recorder    in the step in which every operation is looked at (`--profile.memory`)

The first two are bound to 1 % and 3 %: exit status 3 where they cost more. The last two are for a few steps, and told.

What measuring does depends on a model's layers and not on their width, and is less than the noise of a whole step. So
it is timed on the same layers made thin (`--thin`), where it shows, and held against the bare step of the full ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard import process

process.prepare_torch()

import torch  # noqa: E402

from zeroshard.comm import NullCommunicator, ObservedCommunicator  # noqa: E402
from zeroshard.lab.bench.report import environment, spread_of  # noqa: E402
from zeroshard.lab.bench.step import SHAPES, Shape, batch, make_model  # noqa: E402
from zeroshard.lab.predict.buffers import buffers_of  # noqa: E402
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes  # noqa: E402
from zeroshard.lab.predict.traffic import messages  # noqa: E402
from zeroshard.profiling.clock import Clock  # noqa: E402
from zeroshard.profiling.memory import AllocationRecorder, ThreePoints  # noqa: E402
from zeroshard.profiling.overlap import TimedOperation, under_way  # noqa: E402
from zeroshard.profiling.trace import named_units  # noqa: E402
from zeroshard.train.records.plan_contract import Contract, Planned, Sent  # noqa: E402
from zeroshard.zero import STAGES, Zero  # noqa: E402

LIMITS = {"off": 0.01, "on": 0.03}
BARE = "bare"


def contestant(name: str, shape: Shape, stage: int) -> Callable[[], None]:
    """A function that takes a step."""
    model = make_model(shape, "cpu")
    inner = NullCommunicator(2)
    comm = inner if name == BARE else ObservedCommunicator(inner, timed=name in ("on", "trace"))
    zero = Zero(model, stage, units=model.blocks, comm=comm)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    tokens, targets = batch(shape, 0, torch.device("cpu"))
    planned = make_model(shape, "meta")
    clock = Clock("cpu", enabled=name != BARE)
    buffers = buffers_of(planned, 2, list(planned.blocks))
    row = STAGES[stage]
    sent = [Sent(m.op, m.num_bytes, f"{m.buffer}/{m.phase}", 2) for m in messages(buffers, row)]
    contract = Contract(Planned(state_bytes(buffers, row, 0, OPTIMIZER_STATES["AdamW"]), sent))
    if name != BARE:
        ThreePoints(optimizer, zero.memory_bytes)

    def take() -> None:
        with clock.span("forward"):
            loss = model(tokens, targets)
        with clock.span("backward"):
            loss.backward()
        with clock.span("clip"):
            zero.clip_grad_norm_(1.0)
        with clock.span("update"):
            optimizer.step()
        if isinstance(comm, ObservedCommunicator):
            held, exposed = zero.memory_bytes(), comm.exposed.take()
            records = comm.drain()
            contract.see(2, records, held, taken=True)
            clock.take()
            if comm.timed:
                ended = ((r, r.ended_at_s) for r in records)
                under_way([TimedOperation(r.label, r.issued_at_s, end_s) for r, end_s in ended if end_s is not None])
                del exposed
        optimizer.zero_grad()

    def watched() -> None:
        with contextlib.ExitStack() as stack:
            if name == "trace":
                stack.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
                stack.enter_context(named_units([(unit.name, unit.module) for unit in zero.units]))
            if name == "recorder":
                recorder = AllocationRecorder(zero.holdings).follow(model, optimizer)
                stack.callback(recorder.remove)
                stack.enter_context(recorder)
            timed_take(take)

    for _ in range(2):
        take()
    assert name == BARE or not contract.difference, contract.difference
    return watched


_taken: list[tuple[float, float]] = []


def timed_take(take: Callable[[], None]) -> None:
    """What surrounds a step (a profiler's start) is not part of it."""
    wall, cpu = time.perf_counter(), time.process_time()
    take()
    _taken.append((time.perf_counter() - wall, time.process_time() - cpu))


def own_time(shape: Shape, stage: int, num_rounds: int) -> int:
    """Print milliseconds that measuring adds to a step of thin layers, and their share of one of ``shape``."""
    names = [BARE, *LIMITS]
    thin = replace(shape, n_embd=2 * shape.n_head, vocab_size=64, seq_len=8, batch=1)
    full = contestant(BARE, shape, stage)
    whole = []
    for _ in range(8):
        full()
        whole.append(_taken.pop()[0])
    steps = {name: contestant(name, thin, stage) for name in names}
    order, added = random.Random(0), {name: list[float]() for name in LIMITS}
    for _ in range(num_rounds):
        seen = {}
        for name in order.sample(names, len(names)):
            steps[name]()
            seen[name] = _taken.pop()[0]
        for name, times in added.items():
            times.append(seen[name] - seen[BARE])
    step_s, ok = statistics.median(whole), True
    print(f"a bare step takes {step_s * 1e3:.1f} ms; measuring adds, over {num_rounds} rounds")
    for name, limit in LIMITS.items():
        spread = spread_of(added[name])
        share = spread["median"] / step_s
        ok = ok and share <= limit
        quartiles = f"{spread['low'] * 1e3:.3f}-{spread['high'] * 1e3:.3f}"
        print(f"{name:10} {spread['median'] * 1e3:7.3f} ms ({quartiles})  {share:7.3%}  limit {limit:.0%}")
    return 0 if ok else 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="deep")
    parser.add_argument("--stage", type=int, choices=STAGES, default=3, help="3 sends the most messages")
    parser.add_argument("--rounds", type=int, default=160)
    parser.add_argument("--builds", type=int, default=8, help="of each contestant, over all rounds")
    parser.add_argument("--thin", action="store_true", help="what measuring takes by itself, on thin layers")
    parser.add_argument("--json", type=Path, help="write rounds and summary here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.thin:
        return own_time(SHAPES[args.shape], args.stage, args.rounds)
    names = [BARE, "off", "on", "trace", "recorder"]
    order = random.Random(0)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(args.rounds):
        if number % (args.rounds // args.builds) == 0:
            steps = {}  # the old ones go first
            steps = {name: contestant(name, SHAPES[args.shape], args.stage) for name in order.sample(names, len(names))}
        visited = names if number % 4 == 0 else names[:3]  # the slow ones in every fourth round
        for name in order.sample(visited, len(visited)):
            steps[name]()
            seen[name].append(_taken.pop())
    rows: list[dict[str, Any]] = []
    ok = True
    print(f"{args.shape}, stage {args.stage}, {args.rounds} rounds, {args.builds} builds")
    print(f"{'':10} {'wall ms':>9} {'/ bare':>8} {'quartiles':>15} {'cpu / bare':>11} {'limit':>6}")
    for name in names:
        rounds = range(0, args.rounds, 4) if name in names[3:] else range(args.rounds)
        wall, cpu = ([seen[name][i][kind] / seen[BARE][r][kind] for i, r in enumerate(rounds)] for kind in (0, 1))
        row = {"name": name, "wall": spread_of(wall), "cpu": spread_of(cpu), "rounds": seen[name]}
        rows.append(row)
        limit = LIMITS.get(name)
        ok = ok and (limit is None or row["wall"]["median"] <= 1 + limit)
        print(
            f"{name:10} {statistics.median(w for w, _ in seen[name]) * 1e3:9.2f} {row['wall']['median']:8.4f} "
            f"{row['wall']['low']:7.4f}-{row['wall']['high']:<7.4f} {row['cpu']['median']:11.4f} "
            f"{f'{limit:.0%}' if limit else '':>6}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"environment": environment(), **vars(args) | {"json": str(args.json)}, "rows": rows})
        )
    return 0 if ok else 3


if __name__ == "__main__":
    sys.exit(main())
