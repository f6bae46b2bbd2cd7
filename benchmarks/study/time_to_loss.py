"""The study's chapter on remedies of slow links: seconds of a step on each link, times to a loss, and the planner's 7B.

    zeroshard sweep --config configs/sweeps/study-remedies.toml         # curves, each trained once: minutes, input.txt
    sudo python benchmarks/study/time_to_loss.py links                  # steps on links of 10 Mbit/s to 1 Gbit/s
    python benchmarks/study/time_to_loss.py collect sweeps/study-remedies
    python benchmarks/study/time_to_loss.py plan                        # LLaMA 7B on 8 nodes of 8 GPUs: no GPU needed
    python benchmarks/study/time_to_loss.py draw                        # the figure, and tables

All but the last write into docs/study.json, each its own part. ``links`` takes turns: in each round every remedy takes
its steps, so that what else the machine does meets all alike. At a step without an outer step replicas send nothing, so
a round of H steps is H - 1 of these and one with an outer step: both are measured, with one every second step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from zeroshard.host import process

process.prepare_torch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from two_nodes import result_of_ranks, sent_so_far  # noqa: E402

from zeroshard.comm import RingCommunicator  # noqa: E402
from zeroshard.lab.planner.planner import planner_for  # noqa: E402
from zeroshard.lab.report import png  # noqa: E402
from zeroshard.lab.report.figure import CYCLE, GREY, MARKERS, Axis, Figure, Series, bandwidth_in_words  # noqa: E402
from zeroshard.lab.report.marks import bandwidth_ticks  # noqa: E402
from zeroshard.lab.sweep.cases import SweepConfig, make_case  # noqa: E402
from zeroshard.lab.sweep.results import read_sweep  # noqa: E402
from zeroshard.parallel.zero import ZeroStrategy  # noqa: E402
from zeroshard.settings.sizes import parse_bandwidth  # noqa: E402
from zeroshard.settings.validate import validate  # noqa: E402
from zeroshard.train.config.config import TrainConfig  # noqa: E402
from zeroshard.train.config.toml import read_toml  # noqa: E402
from zeroshard.train.setup.assemble import sharded  # noqa: E402
from zeroshard.zero import LocalSteps  # noqa: E402

ROOT = Path(__file__).parents[2]
FACTS, IMAGES = ROOT / "docs" / "study.json", ROOT / "docs" / "images"
SWEEP_FILE = ROOT / "configs" / "sweeps" / "study-remedies.toml"
LINKS = ("10Mbit/s", "30Mbit/s", "100Mbit/s", "300Mbit/s", "1Gbit/s")
SHARE_OF_STEPS = 0.8  # of the first remedy's, after which its loss is the target
ROUNDS = 4  # after one that warms up
IDS = 1024  # of the tokenizer
PORT = 29518  # in namespaces of its own
WIRES = ("none", "bf16", "int8", "int8,int4", "int4")
# Who takes turns, and its steps in a turn. Outer steps do not depend on the stage where a replica is one rank.
CONTESTANTS = {
    **{
        f"{wire} at stage {stage}": (wire, stage, 1)
        for stage in (2, 3)
        for wire in WIRES
        if stage == 2 or "-" not in wire
    },
    **{every: (every, 2, 2) for every in ("every=2", "every=2,int8", "every=2,int4")},
}
AVERAGED = "outer-lr=1,outer-momentum=0"
SHOWN = (
    *WIRES,
    "every=8",
    "every=32",
    "every=128",
    "every=32,int8",
    f"every=8,{AVERAGED}",
    f"every=32,{AVERAGED}",
    f"every=8,int8,{AVERAGED}",
    f"every=16,int8,{AVERAGED}",
    f"every=16,int4,{AVERAGED}",
)
FORMATS = {"bf16": "bfloat16"}
NUMBERS = {"outer-lr": "outer_lr", "outer-momentum": "outer_momentum"}


def settings_of(remedy: str) -> dict[str, Any]:
    """The settings of a remedy by its name: ``int8,int4`` (weights, gradients) or ``every=32,int8`` (local steps)."""
    parts = [] if remedy == "none" else remedy.split(",")
    numbers = dict(part.split("=") for part in parts if "=" in part)
    formats = [FORMATS.get(part, part) for part in parts if "=" not in part]
    if not numbers:
        return {"wire.weights": formats[0], "wire.grads": formats[-1]} if formats else {}
    settings = {f"local_steps.{NUMBERS.get(key, key)}": int(number) for key, number in numbers.items()}
    return {"shard_size": 1, **settings, **({"local_steps.wire": formats[0]} if formats else {})}


# -- steps on links ----------------------------------------------------------------------------------------------


class Contestant:
    """One engine with its optimizer, and of each step seconds and bytes that left the node."""

    def __init__(self, remedy: str, stage: int, comm: RingCommunicator) -> None:
        base = {**read_toml(str(SWEEP_FILE))["base"], "link": {}, "dtype": "float32"}
        config = make_case(base, {"strategy": f"zero{stage}", "remedy": settings_of(remedy)}).config
        assert isinstance(config, TrainConfig)
        self.comm, self.seconds, self.cpu_s, self.sent_bytes = comm, [], [], []
        self.model, strategy = sharded(config, IDS, None, comm, torch.device("cpu"))
        assert isinstance(strategy, ZeroStrategy)
        self.strategy = strategy
        shape = (config.micro_batch_size, config.seq_len + 1)
        self.tokens = torch.randint(IDS, shape, generator=torch.Generator().manual_seed(comm.rank))

    def turn(self, num_steps: int) -> None:
        """``num_steps`` steps as the trainer takes them, each of which ranks begin and end together."""
        for _ in range(num_steps):
            self.comm.barrier()
            sent, start, cpu = sent_so_far(), time.perf_counter(), time.process_time()
            self._step()
            self.comm.barrier()
            self.seconds.append(time.perf_counter() - start)
            self.cpu_s.append(time.process_time() - cpu)
            self.sent_bytes.append(sent_so_far() - sent)

    def _step(self) -> None:
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        self.strategy.clip_grad_norm_(1.0)
        self.strategy.optimizer.step()
        self.strategy.optimizer.zero_grad()
        if self.strategy.zero.local_steps is not None:
            self.strategy.zero.local_steps.step()

    def forget(self) -> None:
        """What was measured while it warmed up."""
        for each in (self.seconds, self.cpu_s, self.sent_bytes):
            each.clear()


def rank_main(address: str, rank: int, names: list[str]) -> None:
    """One node: make the contestants of these names, take turns, and on rank 0 print what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{address}:{PORT}", rank=rank, world_size=2, timeout=timedelta(seconds=600))
    comm = RingCommunicator()
    contestants = {name: Contestant(*CONTESTANTS[name][:2], comm) for name in names}
    for name, contestant in contestants.items():  # warms up
        contestant.turn(CONTESTANTS[name][2])
        contestant.forget()
    for _ in range(ROUNDS):
        for name, contestant in contestants.items():
            contestant.turn(CONTESTANTS[name][2])
    if rank == 0:
        found = {
            name: {"s": _rounded(each.seconds), "cpu_s": _rounded(each.cpu_s), "sent_bytes": each.sent_bytes}
            for name, each in contestants.items()
        }
        print("RESULT " + json.dumps(found), flush=True)
    comm.close()
    dist.destroy_process_group()


def _rounded(seconds: list[float]) -> list[float]:
    return [round(each, 4) for each in seconds]


def measured(bandwidth: str, names: list[str]) -> dict[str, Any]:
    """Two namespaces with this link between them, a rank in each; seconds and bytes of each step by contestant."""
    load = os.getloadavg()[0]
    found = result_of_ranks(__file__, names, bandwidth)
    return {"load": [round(load, 1), round(os.getloadavg()[0], 1)], **found}


def per_step(link: dict[str, Any], remedy: str, stage: int) -> tuple[float, float]:
    """Mean seconds and bytes of a step of ``remedy`` over a whole round, from the turns that were measured.

    Of steps that repeat the median is taken.
    """
    contestant = _turns(remedy, stage)
    found = []
    for what in ("s", "sent_bytes"):
        turns = link[contestant][what]
        if remedy in WIRES:
            found.append(statistics.median(turns))
        else:
            every = settings_of(remedy)["local_steps.every"]
            alone, outer_step = (statistics.median(turns[first::2]) for first in (0, 1))
            found.append(((every - 1) * alone + outer_step) / every)
    return found[0], found[1]


def _turns(remedy: str, stage: int) -> str:
    """The contestant whose turns say how long the remedy's steps are."""
    if remedy in WIRES:
        return f"{remedy} at stage {stage}"
    wire = settings_of(remedy).get("local_steps.wire")
    return "every=2" + (f",{wire}" if wire else "")


# -- the planner --------------------------------------------------------------------------------------------------

GBITS = (1, 2, 5, 10, 25, 50, 100)
INT8_BY_NODES = {"gather": "int8", "reduce": "int8", "node_size": 8}
PLANNED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # stage, precision, and how state is spread
    "stage 2": (2, {}, {}),
    "stage 3": (3, {}, {}),
    "stage 3, int8": (3, {"gather": "int8", "reduce": "int8"}, {}),
    "stage 3, int8, node copy": (3, {"gather": "int8", "reduce": "int8"}, {"node_copy": 8}),
    "stage 2, int8 by nodes": (2, INT8_BY_NODES, {}),
    "stage 3, int8 by nodes": (3, INT8_BY_NODES, {}),
    "stage 3, int8 by nodes, node copy": (3, INT8_BY_NODES, {"node_copy": 8}),
    "stage 3, int8, int4 gradients by nodes, node copy": (3, {**INT8_BY_NODES, "reduce": "int4"}, {"node_copy": 8}),
    "stage 3 over 8": (3, {}, {"shard_size": 8}),
    "stage 3 over 8, int8": (3, {"gather": "int8", "reduce": "int8"}, {"shard_size": 8}),
    "stage 3 over 8, int4 gradients": (3, {"gather": "int8", "reduce": "int4"}, {"shard_size": 8}),
    "stage 3 over 8, every 8": (3, {}, {"shard_size": 8, "local_steps": LocalSteps(8)}),
    "stage 3 over 8, every 32": (3, {}, {"shard_size": 8, "local_steps": LocalSteps(32)}),
    "stage 3 over 8, every 32, int4": (3, {}, {"shard_size": 8, "local_steps": LocalSteps(32, wire="int4")}),
    "stage 3 over 8, every 128": (3, {}, {"shard_size": 8, "local_steps": LocalSteps(128)}),
}


def plan() -> dict[str, Any]:
    """Tokens a second of a GPU by remedy and bandwidth: llama-7b on 8 x 8 H100s, two sequences a micro-batch."""
    whole = planner_for("llama-7b", world_size=64, seq_len=2048, impl="kernels", attention="flash-2")
    rows = {}
    for name, (stage, precision, spread) in PLANNED.items():
        workload = replace(whole.workload, precision=replace(whole.workload.precision, **precision))
        planner = whole.on(workload=workload, node_copy=spread.get("node_copy"))
        speeds = []
        for gbit in GBITS:
            link = replace(planner.cluster.between, bytes_per_s=gbit * 1e9 / 8)
            row = planner.on(between=link).row(stage, 2, spread.get("shard_size"), spread.get("local_steps"))
            speeds.append(round(row.tokens_per_s / 64, 1))
        rows[name] = {"fits": row.fits, "needed_bytes": row.needed_bytes, "tokens_per_s": speeds}
        print(name, speeds, flush=True)
    return {"gbits": GBITS, "rows": rows}


# -- what came out ------------------------------------------------------------------------------------------------


def rows_of(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each remedy at each stage on each link: seconds of a step, steps and seconds to the target."""
    target = facts["target"]
    for stage in (2, 3):
        for remedy in SHOWN:
            curve = facts["curves"].get(remedy)
            if curve is None:
                continue
            steps = next((step for step, loss in curve if loss <= target), None)
            for bandwidth in _sorted(facts["links"]):
                link = facts["links"][bandwidth]
                if _turns(remedy, stage) not in link:
                    continue
                step_s, sent = per_step(link, remedy, stage)
                row = {"stage": stage, "remedy": remedy, "bandwidth": bandwidth, "step_s": step_s, "sent_bytes": sent}
                yield {**row, "steps": steps, "s": steps and steps * step_s, "num_steps": curve[-1][0]}


def figure(rows: list[dict[str, Any]], target: float) -> Figure:
    """Seconds to the target against bandwidth at stage 2; grey and dashed where it was never reached."""
    series: list[Series] = []
    for remedy in SHOWN:
        mine = sorted((row for row in rows if row["remedy"] == remedy and row["stage"] == 2), key=_rate)
        if mine:
            never = mine[0]["steps"] is None
            y = tuple((row["s"] or row["num_steps"] * row["step_s"]) for row in mine)
            index = sum(line.dashed is never for line in series)
            colour, marker = GREY if never else CYCLE[index % len(CYCLE)], MARKERS[index % len(MARKERS)]
            name = _name(remedy) + (f": not in {mine[0]['num_steps']} steps" if never else "")
            series.append(Series(name, "line", colour, tuple(map(_rate, mine)), y, marker=marker, dashed=never))
    ticks = bandwidth_ticks({_rate(row) for row in rows})
    title = f"Time to a validation loss of {target:.3f}, two nodes, stage 2"
    x = Axis("bandwidth of a link, each way", log=True, ticks=ticks)
    return Figure("slow-links", title, x, Axis("s", log=True), tuple(series), height=1.8)


def _name(remedy: str) -> str:
    """As the tables and the figure call it."""
    return "fp32" if remedy == "none" else remedy.replace(f",{AVERAGED}", ", averaged")


def tables(facts: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    """As Markdown: seconds to the target with how many times as fast as fp32 at its stage; bytes; the planner's."""
    links = _sorted(facts["links"])
    for stage in (2, 3):
        yield f"\nstage {stage}: s to {facts['target']:.4f} ({facts['why']}), times as fast as fp32\n"
        yield "| remedy | steps | MB a step | " + " | ".join(bandwidth_in_words(_rate({"bandwidth": b})) for b in links)
        base = {row["bandwidth"]: row["s"] for row in rows if (row["stage"], row["remedy"]) == (stage, "none")}
        for remedy in SHOWN:
            mine = {row["bandwidth"]: row for row in rows if (row["stage"], row["remedy"]) == (stage, remedy)}
            if mine:
                first = next(iter(mine.values()))
                steps = first["steps"] or f"not in {first['num_steps']}"
                cells = [_cell(mine[link], base[link]) if link in mine else "not timed" for link in links]
                yield f"| {_name(remedy)} | {steps} | {first['sent_bytes'] / 1e6:.3f} | " + " | ".join(cells) + " |"
    for name in links:
        link = facts["links"][name]
        yield f"{name}: loads {sorted({tuple(each) for each in link['load'].values()})}"
    for name, row in facts.get("plan", {}).get("rows", {}).items():
        cells = " | ".join(f"{speed:,.0f}" for speed in row["tokens_per_s"])
        yield f"| {name} | {row['needed_bytes'] / 2**30:.0f} GiB | {cells} |"


def _cell(row: dict[str, Any], base: float | None) -> str:
    step = f"{row['step_s'] * 1e3:,.0f} ms"
    return f"{row['s']:,.0f} s, {base / row['s']:.1f} x ({step})" if row["s"] and base else f"- ({step})"


def _rate(row: dict[str, Any]) -> float:
    return parse_bandwidth("bandwidth", row["bandwidth"])


def _sorted(bandwidths: Iterable[str]) -> list[str]:
    return sorted(bandwidths, key=lambda bandwidth: _rate({"bandwidth": bandwidth}))


def curves_of(folder: Path) -> dict[str, Any]:
    """Validation losses by step of each remedy of a sweep, and the target: the first one's after 80 % of its steps."""
    curves = {
        name: [(each.step, each.loss) for each in case.done[0].evaluations if each.step]
        for case in read_sweep(folder).cases
        for name in SHOWN
        if case.done and case.axes["remedy"] == settings_of(name)
    }
    if not curves:
        raise SystemExit(f"{folder} has no curves: give a sweep of remedies that has ended")
    first, curve = next(iter(curves.items()))
    step, target = next(point for point in curve if point[0] >= SHARE_OF_STEPS * curve[-1][0])
    why = f"what {first} has after {step:,} of {curve[-1][0]:,} steps"
    return {"curves": curves, "target": target, "why": why}


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2], int(os.environ["RANK"]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="what", required=True)
    timed = verbs.add_parser("links", help="time steps")
    timed.add_argument("--bandwidth", nargs="+", default=LINKS)
    timed.add_argument("--only", nargs="+", default=[*CONTESTANTS], choices=[*CONTESTANTS], help="measure these anew")
    verbs.add_parser("collect", help="read the sweep").add_argument("sweep", type=Path)
    verbs.add_parser("plan", help="simulate")
    verbs.add_parser("draw", help="the figure, and tables on stdout")
    args = parser.parse_args()
    whole = json.loads(FACTS.read_text(encoding="utf-8"))
    facts = whole.setdefault("remedies", {})
    if args.what == "draw":
        rows = list(rows_of(facts))
        png.draw(figure(rows, facts["target"]), IMAGES / "slow-links.png")
        print("\n".join(tables(facts, rows)))
        return
    validate(SweepConfig, read_toml(str(SWEEP_FILE)))
    if args.what == "collect":
        facts |= curves_of(args.sweep)
    elif args.what == "plan":
        facts["plan"] = plan()
    else:
        for bandwidth in args.bandwidth:
            found = measured(bandwidth, args.only)
            load = found.pop("load")
            known = facts.setdefault("links", {}).setdefault(bandwidth, {"load": {}})
            known |= found
            known["load"] |= dict.fromkeys(args.only, load)
            print(f"{bandwidth}: load {load}", flush=True)
            FACTS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    FACTS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
