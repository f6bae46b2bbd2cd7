"""Draw the pictures of docs from the stage table, the layouts, plans and the arithmetic that the engine runs on.

    python docs/figures/draw.py [FOLDER]

Each function draws one picture, and is named after it. Nothing in them is drawn by hand: another row in `STAGES`,
another layout or another schedule gives another picture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zeroshard.lab.planner.command import arguments
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.plan import plan
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.predict.buffers import Buffer, buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.lab.predict.traffic import messages
from zeroshard.models import LlamaConfig, build_model
from zeroshard.settings.validate import validate
from zeroshard.zero import STAGES, FlatLayout, MixedPrecision
from zeroshard.zero.core.strategy import SHARD

# readable for the colour-blind: Okabe and Ito, "Color Universal Design", 2008
COLORS = {"params": "#0072B2", "grads": "#E69F00", "optim": "#009E73"}
OP_COLORS = {"all_gather": "#0072B2", "reduce_scatter": "#E69F00", "all_reduce": "#CC79A7"}
BORDER = "#444444"
NUM_RANKS = 4
BLOCK = "blocks.0"
DOCS = Path(__file__).parents[1]


def stages() -> Figure:
    """What lies on each rank: a row of the table is a row of the picture."""
    layout = FlatLayout.of([("weights", [NUM_RANKS])], NUM_RANKS)
    figure = Figure(figsize=(9, 4.6))
    axes = figure.subplots(len(STAGES), NUM_RANKS, sharex=True, sharey=True)
    for stage, row in STAGES.items():
        for rank in range(NUM_RANKS):
            ax: Axes = axes[stage, rank]
            for place, (column, color) in enumerate(COLORS.items()):
                ax.barh(place, layout.padded_numel, color="white", edgecolor=BORDER, linewidth=0.6, height=0.7)
                sharded = getattr(row, column) is SHARD
                start, stop = layout.interval(rank) if sharded else (0, layout.padded_numel)
                ax.barh(place, stop - start, left=start, color=color, edgecolor=BORDER, linewidth=0.6, height=0.7)
            ax.set_yticks(range(len(COLORS)), COLORS, fontsize=8)
            ax.set_xticks([])
            ax.tick_params(left=False)
            for spine in ax.spines.values():
                spine.set_visible(False)
            if stage == 0:
                ax.set_title(f"rank {rank}", fontsize=9)
            if rank == 0:
                ax.set_ylabel(f"stage {stage}", fontsize=9)
    axes[0, 0].set_ylim(2.6, -0.6)
    figure.tight_layout()
    return figure


def layout() -> Figure:
    """The parameters of one block of GPT-2, end to end, and equal shards, which may cut a parameter."""
    (buffer,) = [buffer for buffer in _buffers("gpt2-demo", NUM_RANKS) if buffer.unit == BLOCK]
    figure = Figure(figsize=(9, 2.1))
    ax = figure.subplots()
    cut = buffer.layout
    for index, slot in enumerate(cut.slots):
        shade = "#56B4E9" if index % 2 else "#C9E6F7"
        ax.barh(1, slot.numel, left=slot.offset, color=shade, edgecolor=BORDER, linewidth=0.4)
        if slot.numel > cut.padded_numel / 20:
            name = slot.name.removeprefix(f"{BLOCK}.")
            text = f"{name}\n{' x '.join(map(str, slot.shape))}"
            ax.text(slot.offset + slot.numel / 2, 1, text, ha="center", va="center", fontsize=7)
    for start, stop in cut.padding:
        ax.barh(1, stop - start, left=start, color="white", edgecolor=BORDER, hatch="////")
    for rank in range(cut.world_size):
        start, stop = cut.interval(rank)
        ax.barh(0, stop - start, left=start, color="#EEEEEE", edgecolor=BORDER, linewidth=0.6)
        pieces = len(cut.owned(rank))
        ax.text((start + stop) / 2, 0, f"rank {rank}: {pieces} pieces", ha="center", va="center", fontsize=8)
    ax.set_yticks([0, 1], ["shards", "parameters"])
    ax.set_xlabel(f"elements of the flat buffer of {BLOCK} in gpt2-demo ({cut.numel:,})")
    _bare(ax)
    figure.tight_layout()
    return figure


def schedule() -> Figure:
    """The collectives of one step, in order of issue, at each stage."""
    buffers = _buffers("gpt2-demo", NUM_RANKS)
    figure = Figure(figsize=(9, 5.2))
    axes = figure.subplots(len(STAGES), 1, sharex=True, sharey=True)
    for (stage, row), ax in zip(STAGES.items(), axes, strict=True):
        for index, message in enumerate(messages(buffers, row)):
            ax.bar(index, message.num_bytes / 1e6, width=0.9, color=OP_COLORS[message.op])
            name = message.buffer.removeprefix("blocks.")
            ax.text(index, 0.03, name, ha="center", fontsize=8, color="white")
        ax.set_ylabel(f"stage {stage}\n[MB]", fontsize=9)
        _bare(ax)
    axes[0].legend([Patch(color=c) for c in OP_COLORS.values()], OP_COLORS, frameon=False, fontsize=8)
    axes[-1].set_xticks([])
    axes[-1].set_xlabel("collectives of one step of gpt2-demo in order of issue; at their feet, the block they carry")
    figure.tight_layout()
    return figure


def memory() -> Figure:
    """Training state of a LLaMA of 7 billion parameters on a rank, by the number of ranks."""
    worlds = [2**power for power in range(11)]
    figure = Figure(figsize=(9, 3.4))
    ax = figure.subplots()
    lines = zip(STAGES, ["#000000", *COLORS.values()], "os^d", strict=True)
    by_world = {world: _buffers("llama-7b", world) for world in worlds}
    for stage, color, marker in lines:
        held = [
            sum(state_bytes(by_world[world], STAGES[stage], 0, OPTIMIZER_STATES["AdamW"]).values()) / 1e9
            for world in worlds
        ]
        ax.plot(worlds, held, color=color, marker=marker, label=f"stage {stage}")
    ax.axhline(80, color="grey", linestyle="--")
    ax.text(1.01, 80, "80 GB", color="grey", va="center", fontsize=9, transform=ax.get_yaxis_transform())
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(worlds, worlds)
    ax.set_xlabel("ranks")
    ax.set_ylabel("training state on a rank [GB]")
    ax.set_title("llama-7b, AdamW, fp32, without activations", fontsize=10)
    ax.legend(frameon=False)
    _bare(ax)
    figure.tight_layout()
    return figure


MACHINES = {"rtx-4090": "#009E73", "a100-80gb": "#0072B2", "h100-80gb": "#E69F00"}


def exposed() -> Figure:
    """Seconds for which a step waits for the host's updates, with all state of llama-7b there, by plans of one GPU."""
    figure = Figure(figsize=(7.5, 4))
    ax: Axes = figure.subplots()
    for gpu, color in MACHINES.items():
        found = [(rows * 2048, _planned(gpu, rows)) for rows in (1, 2, 4, 8, 16, 32)]
        shown = [(tokens, row.offloaded.waiting_s, row.timing.step_s) for tokens, row in found if row.fits]
        tokens, waiting, seconds = zip(*shown, strict=True)
        ax.plot(tokens, waiting, color=color, marker="o", label=f"{gpu}: it waits")
        ax.plot(tokens, seconds, color=color, linestyle=":", label=f"{gpu}: a step")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([2048 * 2**n for n in range(6)], [f"{2 * 2**n}k" for n in range(6)])
    ax.set_xlabel("tokens of a step")
    ax.set_ylabel("seconds")
    ax.set_title("llama-7b on one GPU, --offload optimizer --offload.fraction 1", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _bare(ax)
    figure.tight_layout()
    return figure


def _planned(gpu: str, micro_batch: int) -> Row:
    model = {"name": "llama-7b", "activation_checkpointing": "full"}
    offload = {"state": "optimizer", "fraction": "1"}
    config = validate(PlanConfig, {"model": model, "offload": offload, "gpu": gpu, "gpus": 1, "seq_len": 2048})
    return plan(**arguments(config), stage=2, micro_batch=micro_batch).rows[0]


LEVERS = {  # how blocks are recomputed, tiles, ranks that share a sequence: and thousands of tokens where lines bend
    ("full", "none", 1): ("#E69F00", "recomputed: full", (1, 64)),
    ("offload", "none", 1): ("#CC79A7", "and inputs on the host", (1, 64)),
    ("offload", "auto", 1): ("#0072B2", "and tiles", (1, 2, 4, 64)),
    ("offload", "auto", 4): ("#009E73", "and over 4 ranks", (1, 4, 8, 16, 64)),
}


def long_context() -> Figure:
    """Bytes of activations at a step's peak, by the length of a sequence and by lever: planned, and as measured."""
    figure = Figure(figsize=(7.5, 4))
    ax: Axes = figure.subplots()
    for (how, tiles, ranks), (color, label, thousands) in LEVERS.items():
        lengths = [1024 * each for each in thousands]
        planned = [_activations(how, tiles, ranks, length) / length / 1024 for length in lengths]
        ax.plot(lengths, planned, color=color, label=label)
    rows = _table(DOCS / "how-to" / "long-context.md", "| tokens | `full`: planned |")
    measured = [(row[0], row[column] * 1024 / row[0]) for row in rows for column in (2, 5)]
    tokens, kib = zip(*measured, strict=True)
    ax.plot(tokens, kib, "o", color="none", markeredgecolor="#000000", label="counted by torch's allocations")
    ax.set_xscale("log", base=2)
    ax.set_xticks([1024 * 2**n for n in range(7)], [f"{2**n}k" for n in range(7)])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens of a sequence")
    ax.set_ylabel("activations at the peak [KiB a token]")
    ax.set_title("LLaMA of 4 blocks of width 64, fp32, on a CPU", fontsize=10)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _bare(ax)
    figure.tight_layout()
    return figure


def _activations(how: str, tiles: str, ranks: int, tokens: int) -> int:
    config = LlamaConfig(256, tokens, n_layer=4, n_head=ranks, n_kv_head=ranks, n_embd=64)
    with torch.device("meta"):
        model = replace(config, activation_checkpointing=how, tiles=tiles).build()
    return trace_language_model(model, 1, tokens, MixedPrecision(), sequence_parallel=ranks).peak_bytes


def _table(page: Path, head: str) -> list[list[float]]:
    """The numbers of the table of a page that begins with ``head``; NaN where there is a dash."""
    lines = page.read_text(encoding="utf-8").partition(head)[2].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([float(cell.replace(",", "").replace("-", "nan")) for cell in line.strip("| ").split("|")])
    return rows


PICTURES: dict[str, Callable[[], Figure]] = {
    "stages": stages,
    "layout": layout,
    "schedule": schedule,
    "memory": memory,
    "exposed": exposed,
    "long-context": long_context,
}


def write(folder: Path) -> list[Path]:
    """Every picture as an SVG in ``folder``: the same bytes each time, with one version of matplotlib."""
    settings: Any = {"svg.hashsalt": "zeroshard", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    paths = []
    with matplotlib.rc_context(settings):
        for name, draw in PICTURES.items():
            paths.append(folder / f"{name}.svg")
            draw().savefig(paths[-1], metadata={"Date": None, "Creator": None})
    return paths


def _buffers(preset: str, world_size: int) -> list[Buffer]:
    with torch.device("meta"):
        model = build_model(preset)
    return buffers_of(model, world_size, model.blocks)


def _bare(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent):
        print(path)
