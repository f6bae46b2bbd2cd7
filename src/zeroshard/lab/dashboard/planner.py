"""The planner's page: its controls are settings of `zeroshard plan`, and it calls `zeroshard.lab.plan`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dash import dcc, html

from zeroshard.errors import UserError
from zeroshard.lab.dashboard.labelled import control, labelled, scrolling
from zeroshard.lab.dashboard.plan_sources import sources
from zeroshard.lab.planner.advice import GIB, MICRO_BATCHES
from zeroshard.lab.planner.command import arguments
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.plan import plan
from zeroshard.lab.planner.plan_rows import Plan, Row
from zeroshard.lab.planner.show import COLUMNS, heading, lines, notes
from zeroshard.lab.predict.hardware import DEVICES, LINKS
from zeroshard.lab.report.figure import BLACK, GREEN, GREY, VERMILLION, Axis, Figure, Series
from zeroshard.lab.report.interactive import CONFIG, as_plotly
from zeroshard.lab.report.run_figures import CATEGORY_COLOURS
from zeroshard.models.presets import PRESETS
from zeroshard.train.config.named_code import require_trust
from zeroshard.train.config.validate import validate

BANDWIDTHS = ("100Mbit/s", "1Gbit/s", "10Gbit/s", "25Gbit/s", "100Gbit/s", "200Gbit/s", "400Gbit/s", "800Gbit/s")
OPTIMIZERS = ("AdamW", "AdamW8bit", "Adafactor", "Lion", "Muon", "SGD")
WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_ONE_AT_A_TIME = threading.Lock()  # tracing a model uses all CPU cores
_CHOICES: Mapping[str, tuple[str, list[tuple[Any, str]], Any]] = {
    "model": ("Model", [(name, name) for name in PRESETS], "gpt2-1.5b"),
    "gpu": ("GPU", [(name, name) for name in DEVICES], "h100-80gb"),
    "gpus": ("GPUs", [(count, f"{count:,}") for count in WORLDS], 16),
    "gpus_per_node": ("GPUs in a node", [(count, str(count)) for count in (1, 2, 4, 8, 16)], 8),
    "network": ("Network of each GPU", [(name, name) for name in (*BANDWIDTHS, *LINKS)], "400Gbit/s"),
    "rails": (
        "Network cards of a node",
        [(0, "one a GPU"), *((count, str(count)) for count in (1, 2, 4, 8, 16))],
        0,
    ),
    "oversubscription": ("Oversubscription", [(1.0, "none"), *((float(n), f"{n} : 1") for n in (2, 3, 4, 8))], 1.0),
    "stage": ("Stage", [("all", "all"), *((str(stage), str(stage)) for stage in range(4))], "all"),
    "micro_batch": ("Micro-batch", [(0, "as many as fit"), *((size, str(size)) for size in MICRO_BATCHES)], 0),
    "impl": ("Implementation", [(name, name) for name in ("auto", "eager", "compile", "kernels")], "auto"),
    "optimizer": ("Optimizer", [(name.lower(), name) for name in OPTIMIZERS], "adamw"),
    "reduce_dtype": ("Gradients sent in", [("master", "fp32"), ("bfloat16", "bf16")], "master"),
    "offload": ("Offload", [("none", "none"), ("optimizer", "optimizer to the host")], "none"),
    "tensor_parallel": ("Tensor parallel", [(size, str(size)) for size in (1, 2, 4, 8)], 1),
    "seq_len": ("Sequence, tokens", [(0, "the model's"), *((2**p, f"{2**p:,}") for p in range(8, 14))], 0),
}
CONTROLS = tuple(_CHOICES)


def page() -> html.Div:
    """The controls, and the element for the answer, still empty."""
    controls = [
        control(
            title,
            dcc.Dropdown(
                id=f"plan-{name}",
                options=[{"label": text, "value": choice} for choice, text in choices],
                value=chosen,
                clearable=False,
            ),
        )
        for name, (title, choices, chosen) in _CHOICES.items()
    ]
    return html.Div(
        [
            html.Div(controls, className="controls"),
            dcc.Loading(html.Div(id="answer", **{"aria-live": "polite"}), delay_show=300, type="dot"),
        ]
    )


def answer(given: Mapping[str, Any]) -> list[Any]:
    """The output of `zeroshard plan` for the controls' values, with figures; an error is one line."""
    try:
        found = _planned(tuple(sorted(given.items())))
    except UserError as error:
        return [html.P(str(error), className="refusal", role="alert")]
    head = html.Tr([html.Th(title, scope="col") for title in COLUMNS])
    rows = [html.Tr(list(map(html.Td, cells)), className="best" if is_best else "") for cells, is_best in lines(found)]
    graphs = [
        html.Figure(
            [
                html.H3(figure.title),
                labelled(dcc.Graph(figure=as_plotly(figure), config=CONFIG), "img", figure.title),
                html.Figcaption(figure.caption),
            ]
        )
        for figure in (_memory(found), _time(found))
    ]
    return [
        html.P(found.advice, className="advice"),
        *(html.P(note, className="advice") for note in notes(found)),
        scrolling(html.Table([html.Thead(head), html.Tbody(rows)]), "Plans"),
        html.Div(graphs, className="figures"),
        *(html.P(line, className="quiet") for line in heading(found).splitlines()),
        sources(found),
    ]


@lru_cache(maxsize=64)
def _planned(given: tuple[tuple[str, Any], ...]) -> Plan:
    values = dict(given)
    config = validate(PlanConfig, {**values, "model": {"name": values["model"]}})
    require_trust(config.model, "the request", trusted=False)
    stage = None if config.stage == "all" else int(config.stage)
    with _ONE_AT_A_TIME:
        return plan(**arguments(config), stage=stage, micro_batch=config.micro_batch or None)


def chosen(found: Plan) -> list[Row]:
    """The best row for each stage and shard size: the fastest that fits, else the one that lacks the least memory."""
    best: dict[tuple[int | None, int], Row] = {}
    for row in found.rows:
        key = (row.stage, row.shard_size)
        if key not in best or _merit(row) > _merit(best[key]):
            best[key] = row
    return list(best.values())


def _merit(row: Row) -> tuple[bool, float]:
    return row.fits, row.tokens_per_s if row.fits else row.headroom_bytes


def _memory(found: Plan) -> Figure:
    rows = chosen(found)
    tables = [
        {**row.step.peak.by_category, "communicators": row.comm_bytes, "process": row.process.total} for row in rows
    ]
    names = [name for name in CATEGORY_COLOURS if any(table.get(name) for table in tables)]
    names += sorted({name for table in tables for name, n in table.items() if n} - set(names))
    places = tuple(map(float, range(len(rows))))
    bottoms, series = [0.0] * len(rows), []
    for name in names:
        heights = tuple(table.get(name, 0) / GIB for table in tables)
        words, colour = name.replace("_", " "), CATEGORY_COLOURS.get(name, GREY)
        notes = (words,) * len(rows)
        series.append(Series(words, "bar", colour, places, heights, base=tuple(bottoms), notes=notes))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    there = found.device.memory_bytes / GIB
    series.append(Series("what the GPU has", "line", BLACK, (-0.5, len(rows) - 0.5), (there, there), dashed=True))
    return Figure(
        "memory", "Memory at the peak", Axis("", ticks=_names(found, rows)), Axis("GiB", from_zero=True), tuple(series),
        "Of each stage the fastest row that fits, else the one that lacks least; with its micro-batch.",
    )  # fmt: skip


def _time(found: Plan) -> Figure:
    rows = chosen(found)
    places = tuple(map(float, range(len(rows))))
    ms = [1e3 / (row.step.tokens / 1000) for row in rows]
    computing = tuple(row.timing.compute_s * scale for row, scale in zip(rows, ms, strict=True))
    waiting = tuple(row.timing.exposed_s * scale for row, scale in zip(rows, ms, strict=True))
    series = (
        Series("computing", "bar", GREEN, places, computing),
        Series("waiting for the network", "bar", VERMILLION, places, waiting, base=computing),
    )
    y = Axis("ms for 1,000 tokens of a GPU", from_zero=True)
    return Figure("time", "Time", Axis("", ticks=_names(found, rows)), y, series, "Of the same rows.")


def _names(found: Plan, rows: Sequence[Row]) -> dict[float, str]:
    """Tick labels: ``stage 3, 4``, the last number being the micro-batch; with smaller groups ``stage 3 over 8, 4``."""
    world_size = found.cluster.world_size
    groups = ["" if row.shard_size == world_size else f" over {row.shard_size}" for row in rows]
    return {
        float(place): f"{f'stage {row.stage}' if world_size > 1 else 'one GPU'}{group}, {row.micro_batch}"
        for place, (row, group) in enumerate(zip(rows, groups, strict=True))
    }
