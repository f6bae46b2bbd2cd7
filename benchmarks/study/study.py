"""What docs/study.md shows: the planner's simulation, what sweeps have measured, and figures of both.

    python benchmarks/study/study.py plan              # GPT-2 1.5B and LLaMA 7B on up to 1,024 GPUs: no GPU needed
    python benchmarks/study/study.py collect sweeps/study-*  # medians of finished sweeps
    python benchmarks/study/study.py draw              # figures and tables, from docs/study.json alone

The first two write into docs/study.json, each its own part. The planner's device is an H100 and its rates are of data
sheets; bandwidths are of one GPU in one direction.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard.host import process

process.prepare_torch()

from zeroshard.lab.bench.report import environment  # noqa: E402
from zeroshard.lab.planner.planner import Planner, Row, planner_for  # noqa: E402
from zeroshard.lab.planner.ways import Ways  # noqa: E402
from zeroshard.lab.predict.hardware import Link, find_link  # noqa: E402
from zeroshard.lab.predict.timeline import simulate  # noqa: E402
from zeroshard.lab.report import png  # noqa: E402
from zeroshard.lab.report.figure import Axis, Figure, Series, bandwidth_in_words  # noqa: E402
from zeroshard.lab.report.marks import bandwidth_ticks, style  # noqa: E402
from zeroshard.lab.run_folders import Spread  # noqa: E402
from zeroshard.lab.sweep.results import CaseResult, read_sweep  # noqa: E402
from zeroshard.settings.sizes import parse_bandwidth  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
FACTS, IMAGES = DOCS / "study.json", DOCS / "images"
# name: tokens of a sequence; sequences of a micro-batch where all stages have the same, and of a step of all GPUs
MODELS = {"gpt2-1.5b": (1024, 8, 1024), "llama-7b": (2048, 2, 2048)}
GPUS = (16, 64, 256, 1024)
GBITS = (1, 2, 5, 10, 25, 50, 100, 200, 400)
GROWING = (8, 16, 24, 32, 48, 64)  # layers like llama-7b's
GROWING_GBITS = (10, 100, 400)
STAGES = (0, 1, 2, 3)
SHOWN_GPUS = 64
DRAW = 0.02  # stages that are no further apart are as fast as each other
KEEP = ("link.bandwidth", "link.mode", "nproc", "model.n_layer", "model.n_embd", "micro_batch_size", "overlap", "comm")


# -- the planner ------------------------------------------------------------------------------------------------


class Simulated:
    """Steps of one model in one world, each laid out for as many networks as are asked for."""

    def __init__(self, model: str, gpus: int, seq_len: int, **kwargs: Any) -> None:
        how: dict[str, Any] = {"impl": "kernels", "attention": "flash-2", **kwargs}
        self.planner: Planner = planner_for(model, world_size=gpus, seq_len=seq_len, **how)
        self._rows: dict[tuple[int, int], Row] = {}

    def row(self, stage: int, micro_batch: int) -> Row:
        if (stage, micro_batch) not in self._rows:
            self._rows[stage, micro_batch] = self.planner.row(stage, micro_batch)
        return self._rows[stage, micro_batch]

    def filled(self, stage: int) -> int:
        """The largest micro-batch that fits; 0: none."""
        low, high = 0, 1
        while self.planner.row(stage, high).fits:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.planner.row(stage, middle).fits else (low, middle)
        return low

    def tokens_per_s(self, stage: int, micro_batch: int, link: Link) -> float:
        """Of one GPU."""
        row = self.row(stage, micro_batch)
        timing = simulate(row.step, self.planner.device, replace(self.planner.cluster, between=link))
        return row.step.tokens / timing.step_s

    def speeds(self, stage: int, sizes: Sequence[int], gbits: Iterable[float]) -> list[float]:
        """With the fastest of these micro-batches at each bandwidth."""
        links = [find_link(f"{gbit:g}Gbit/s") for gbit in gbits]
        return [round(max(self.tokens_per_s(stage, size, link) for size in sizes), 1) for link in links]


def plan(found: dict[str, Any], save: Callable[[], None]) -> None:
    """Tokens a second of a GPU by model, world, stage and bandwidth, in three ways of comparing stages; and how this
    goes as models grow. What is in ``found`` already is kept.
    """
    found |= {"gbits": GBITS, "growing_gbits": GROWING_GBITS, "gpu": "h100-80gb", "gpus_per_node": 8}
    rows, growing = found.setdefault("rows", []), found.setdefault("growing", [])
    for (model, shape), gpus in itertools.product(MODELS.items(), (8, *GPUS)):
        if not any((row["model"], row["gpus"]) == (model, gpus) for row in rows):
            rows += _rows(model, gpus, *shape)
            save()
            print(f"{model} on {gpus} GPUs", flush=True)
    for num_layers in GROWING:
        if not any(row["n_layer"] == num_layers for row in growing):
            growing += _grown(num_layers)
            save()
            print(f"{num_layers} layers", flush=True)
    if "larger" not in found:
        found["larger"] = list(_larger())
        save()


def _rows(model: str, gpus: int, seq_len: int, same: int, batch: int) -> Iterator[dict[str, Any]]:
    one = Simulated(model, gpus, seq_len)
    whole = Simulated(model, gpus, seq_len, global_batch=batch)
    for stage in STAGES:
        full = one.filled(stage)
        fitting = [size for size in Ways(()).micro_batches(whole.planner) if size <= full]
        for mode, simulated, sizes in (
            ("same micro-batch", one, [same] if same <= full else []),
            ("same batch", whole, fitting),
            ("same memory", one, [full] if full else []),
        ):
            if sizes:
                facts = {"model": model, "gpus": gpus, "stage": stage, "mode": mode, "micro_batch": max(sizes)}
                yield {**facts, "tokens_per_s": simulated.speeds(stage, sizes, GBITS)}


def _grown(num_layers: int) -> Iterator[dict[str, Any]]:
    """Models like llama-7b with more layers, each stage with its memory full."""
    simulated = Simulated("llama-7b", SHOWN_GPUS, 2048, overrides={"n_layer": num_layers})
    for stage in STAGES:
        full = simulated.filled(stage)
        yield {
            "n_layer": num_layers,
            "num_params": simulated.planner.workload.num_params,
            "stage": stage,
            "micro_batch": full,
            "tokens_per_s": simulated.speeds(stage, [full], GROWING_GBITS) if full else [],
        }


def _larger() -> Iterator[dict[str, Any]]:
    """The largest of these models at stage 3 on more and more GPUs, their memory full."""
    for gpus in (8, *GPUS):
        simulated = Simulated("llama-7b", gpus, 2048, overrides={"n_layer": GROWING[-1]})
        for mode, size in (("same memory", simulated.filled(3)), ("same micro-batch", 1)):
            speeds = simulated.speeds(3, [size], GROWING_GBITS) if size else []
            yield {"gpus": gpus, "mode": mode, "micro_batch": size, "tokens_per_s": speeds}


# -- what was measured -------------------------------------------------------------------------------------------


def collect(folders: list[Path]) -> dict[str, Any]:
    """Every finished case of each sweep; figures are medians, with the lowest and the highest repeat."""
    return {folder.name: [_facts(case) for case in read_sweep(folder).cases if case.done] for folder in folders}


def _facts(case: CaseResult) -> dict[str, Any]:
    run = case.done[0]
    plan_s = [(each.summary.get("plan") or {}).get("step_s", {}).get("predicted") for each in case.done]
    return {
        "strategy": run.setting("strategy"),
        **{name: run.setting(name) for name in KEEP},
        "num_params": run.start.get("num_params"),
        "peak_bytes": run.peak_bytes,
        "step_s": _spread(case.step_s),
        "tokens_per_s": _spread(case.tokens_per_s),
        "exposed_s": _spread(case.exposed_s),
        "predicted_s": plan_s[0],
        "achieved_bytes_per_s": None if run.link is None else run.link.achieved_bytes_per_s,
        "why_not_comparable": list(case.why_not_comparable),
    }


def _spread(found: Spread | None) -> list[float] | None:
    return None if found is None else [found.low, found.median, found.high]


# -- figures and tables ------------------------------------------------------------------------------------------


def figures(facts: dict[str, Any]) -> Iterator[Figure]:
    """Those that there are data for."""
    runs = facts.get("runs", {})
    if rows := runs.get("study-bandwidth"):
        yield _against_bandwidth(rows, "study-bandwidth", "10.8 M parameters on two nodes, measured; dashed: planned")
    if rows := runs.get("study-memory"):
        yield _against_bandwidth(rows, "study-memory", "10.8 M parameters, simulated links, 256 MiB a rank")
    if planned := facts.get("plan"):
        for model in MODELS:
            yield _planned(planned, model)
        yield _growing(planned)
        yield _superlinear(planned)


def _against_bandwidth(rows: list[dict[str, Any]], name: str, title: str) -> Figure:
    series = []
    for index, strategy in enumerate(sorted({row["strategy"] for row in rows})):
        mine = sorted((row for row in rows if row["strategy"] == strategy), key=_rate)
        colour, marker = style(strategy, index)
        x = tuple(_rate(row) for row in mine)
        low, y, high = (tuple(row["tokens_per_s"][i] for row in mine) for i in range(3))
        hollow = tuple(bool(row["why_not_comparable"]) for row in mine)
        series.append(Series(strategy, "line", colour, x, y, low, high, marker=marker, hollow=hollow))
        if all(row["predicted_s"] for row in mine):
            planned = tuple(row["tokens_per_s"][1] * row["step_s"][1] / row["predicted_s"] for row in mine)
            series.append(Series("", "line", colour, x, planned, dashed=True))
    ticks = bandwidth_ticks(tuple(_rate(row) for row in rows))
    x_axis = Axis("bandwidth of a link, each way", log=True, ticks=ticks)
    return Figure(name, title, x_axis, Axis("tokens/s, all ranks", log=True), tuple(series))


def _planned(planned: dict[str, Any], model: str) -> Figure:
    rates = tuple(gbit * 1e9 / 8 for gbit in planned["gbits"])
    series = []
    for stage, (mode, words) in itertools.product(STAGES, (("same memory", "memory full"), ("same batch", "batch"))):
        colour, marker = style(f"zero{stage}", stage)
        for row in planned["rows"]:
            if (row["model"], row["gpus"], row["stage"], row["mode"]) == (model, SHOWN_GPUS, stage, mode):
                name = f"{stage}, {words} ({row['micro_batch']})"
                speeds, dashed = tuple(row["tokens_per_s"]), mode == "same batch"
                series.append(Series(name, "line", colour, rates, speeds, marker=marker, dashed=dashed))
    title = f"{model} on {SHOWN_GPUS} GPUs, simulated; stage (sequences of its largest micro-batch)"
    x = Axis("network bandwidth of a GPU, each way", log=True, ticks=bandwidth_ticks(rates))
    y = Axis("tokens/s and GPU", log=True)
    return Figure(f"study-{model.replace('.', '-')}", title, x, y, tuple(series), height=1.15)


def _growing(planned: dict[str, Any]) -> Figure:
    """Stage 3 over the best of the others."""
    by_layers: dict[int, list[dict[str, Any]]] = {}
    for row in planned["growing"]:
        by_layers.setdefault(row["n_layer"], []).append(row)
    series = []
    for place, gbit in enumerate(planned["growing_gbits"]):
        points = []
        for rows in by_layers.values():
            speeds = {row["stage"]: row["tokens_per_s"][place] for row in rows if row["tokens_per_s"]}
            if 3 in speeds and len(speeds) > 1:
                others = max(speed for stage, speed in speeds.items() if stage != 3)
                points.append((rows[0]["num_params"] / 1e9, speeds[3] / others))
        colour, marker = style("", place)
        x, y = (tuple(column) for column in zip(*points, strict=True))
        series.append(Series(f"{gbit} Gbit/s a GPU", "line", colour, x, y, marker=marker))
    title = f"Stage 3 against the best of 0-2 on {SHOWN_GPUS} GPUs, each with its memory full, simulated"
    x_axis = Axis("parameters, 10^9", log=True)
    return Figure("study-growing", title, x_axis, Axis("times as fast"), tuple(series))


def _superlinear(planned: dict[str, Any]) -> Figure:
    series = []
    for place, gbit in list(enumerate(planned["growing_gbits"]))[1:]:
        for mode in ("same memory", "same micro-batch"):
            mine = [row for row in planned["larger"] if row["mode"] == mode]
            sizes = sorted({row["micro_batch"] for row in mine})
            name = f"{gbit} Gbit/s, micro-batch {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
            colour, marker = style("", place)
            x, y = (tuple(row["gpus"] for row in mine), tuple(row["tokens_per_s"][place] for row in mine))
            series.append(Series(name, "line", colour, x, y, marker=marker, dashed=mode != "same memory"))
    gpus = sorted({row["gpus"] for row in planned["larger"]})
    x_axis = Axis("GPUs", log=True, ticks={each: str(each) for each in gpus})
    title = "13.2 B parameters at stage 3, simulated; solid: memory full, dashed: one sequence"
    return Figure("study-superlinear", title, x_axis, Axis("tokens/s and GPU", from_zero=True), tuple(series))


def tables(facts: dict[str, Any]) -> Iterator[str]:
    """As Markdown."""
    for name, rows in facts.get("runs", {}).items():
        yield f"\n{name}\n"
        columns = [column for column in _CELLS if any(_CELLS[column](row) for row in rows)]
        yield "| " + " | ".join(columns) + " |"
        yield "|---" * len(columns) + "|"
        for row in rows:
            yield "| " + " | ".join(_CELLS[column](row) or "-" for column in columns) + " |"
    if planned := facts.get("plan"):
        yield from _winners(planned)
        for row in (*planned["growing"], *planned["larger"]):
            yield json.dumps(row)


def _off(row: dict[str, Any]) -> str:
    predicted = row["predicted_s"]
    return f"{predicted * 1e3:.0f} ({predicted / row['step_s'][1] - 1:+.0%})" if predicted else ""


def _milliseconds(spread: list[float] | None) -> str:
    return f"{spread[1] * 1e3:.0f}" if spread and spread[1] else ""


_CELLS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ranks": lambda row: str(row["nproc"]),
    "parameters": lambda row: f"{row['num_params'] / 1e6:.1f} M",
    "link": lambda row: row["link.bandwidth"] or "",
    "achieved": lambda row: f"{row['achieved_bytes_per_s'] / _rate(row):.1%}" if row["achieved_bytes_per_s"] else "",
    "strategy": lambda row: row["strategy"],
    "overlap": lambda row: "" if row["overlap"] else "off",
    "micro-batch": lambda row: str(row["micro_batch_size"]),
    "peak MiB": lambda row: f"{row['peak_bytes'] / 2**20:.0f}" if row["peak_bytes"] else "",
    "step ms": lambda row: _milliseconds(row["step_s"]),
    "planned ms": _off,
    "tokens/s": lambda row: f"{row['tokens_per_s'][1]:,.0f}",
    "exposed ms": lambda row: _milliseconds(row["exposed_s"]),
}


def _winners(planned: dict[str, Any]) -> Iterator[str]:
    """Which stages are fastest, and by how much before the next, for each model, world and bandwidth."""
    for model, mode in itertools.product(MODELS, ("same batch", "same memory")):
        yield f"\n{model}, {mode}\n"
        yield "| GPUs | " + " | ".join(bandwidth_in_words(gbit * 1e9 / 8) for gbit in planned["gbits"]) + " |"
        yield "|---" * (len(planned["gbits"]) + 1) + "|"
        for gpus in GPUS:
            mine = [row for row in planned["rows"] if (row["model"], row["mode"], row["gpus"]) == (model, mode, gpus)]
            speeds = ({r["stage"]: r["tokens_per_s"][place] for r in mine} for place in range(len(planned["gbits"])))
            yield f"| {gpus:,} | " + " | ".join(map(_winner, speeds)) + " |"


def _winner(speeds: dict[int, float]) -> str:
    best = max(speeds.values())
    first = [stage for stage, speed in speeds.items() if speed > (1 - DRAW) * best]
    others = [speed for stage, speed in speeds.items() if stage not in first]
    lead = f" {best / max(others) - 1:+.0%}" if others else ""
    return "/".join(map(str, first)) + lead


def _rate(row: dict[str, Any]) -> float:
    return parse_bandwidth("link.bandwidth", row["link.bandwidth"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="what", required=True)
    verbs.add_parser("plan", help="simulate")
    verbs.add_parser("collect", help="read sweeps").add_argument("sweeps", nargs="+", type=Path)
    verbs.add_parser("draw", help="figures, and tables on stdout")
    args = parser.parse_args()
    facts = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}
    if args.what == "draw":
        for figure in figures(facts):
            png.draw(figure, IMAGES / f"{figure.name}.png")
        print("\n".join(tables(facts)))
        return

    def save() -> None:
        FACTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    if args.what == "plan":
        plan(facts.setdefault("plan", {}), save)
    else:
        facts["environment"] = environment()
        facts["runs"] = {**facts.get("runs", {}), **collect(args.sweeps)}
        save()


if __name__ == "__main__":
    main()
