"""The page and the figures that `benchmarks/gpu_day.py --page` makes of what its pieces have left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Found = dict[str, dict[str, Any]]
HEADING = """# On a GPU

Measured by `python benchmarks/gpu_day.py` and written by its `--page`; nothing here was typed. {machine}
"""
TOYS = "\n**Without a GPU: toy models in an interpreter. No figure on this page claims anything.**\n"
# What is wanted of an H100 or H200.
MFU_WANTED, TAX_WANTED, PLAN_WANTED = {"gpt2-124m": 0.48}, 1.01, 0.03


def read(folder: Path) -> Found:
    """What each piece has left, by its name; those that were skipped are not among them."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: each for name, each in found.items() if "piece" in each and "skipped" not in each}


def write_page(folder: Path, page: Path) -> None:
    """Write ``page``, and beside it ``images/gpu-*.png`` where matplotlib is installed."""
    found = read(folder)
    if not found:
        raise SystemExit(f"error: out: {folder} has no result of a piece; run benchmarks/gpu_day.py first")
    makers = (
        _tests,
        _bits,
        _training,
        _tax,
        _overlap,
        _graphs,
        _memory,
        _saving,
        _kernels,
        _compiled,
        _float8,
        _strategies,
    )
    sections = [section for make in makers if (section := make(found))]
    page.parent.mkdir(parents=True, exist_ok=True)
    figures = draw(found, page.parent / "images")
    text = "\n".join([_heading(found), *sections, *(f"\n![{alt}](images/{name})" for name, alt in figures)])
    page.write_text(text.rstrip() + "\n", encoding="utf-8")


def _heading(found: Found) -> str:
    facts = next(iter(found.values()))["environment"]
    gpu = facts.get("gpu")
    what = facts.get("nvidia_smi") or [gpu or facts.get("cpu", "a CPU")]
    machine = f"{len(what)} x {what[0]}, torch {facts['torch']}, Python {facts['python']}."
    return HEADING.format(machine=machine) + ("" if gpu else TOYS)


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _of(found: Found, beginning: str) -> list[dict[str, Any]]:
    return [each for name, each in found.items() if name.startswith(beginning)]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _spread(value: dict[str, float], scale: float = 1.0, digits: int = 2) -> str:
    middle, low, high = (value[key] * scale for key in ("median", "low", "high"))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _tests(found: Found) -> str:
    lines = [f"`pytest -m gpu`: {each['summary'].strip('= ')}" for each in _of(found, "tests")]
    failed = [f"- {line}" for each in _of(found, "tests") for line in each["failed"]]
    return "\n".join(["\n## Tests\n", *lines, *failed]) if lines else ""


def _bits(found: Found) -> str:
    if "two-ranks" not in found:
        return ""
    same = found["two-ranks"]["same_bits"].items()
    told = "; ".join(f"{policy}: {'the same bits' if equal else 'DIFFERENT BITS'}" for policy, equal in same)
    return f"\n## Two ranks on one GPU\n\nOver gloo, weights after three steps at stages 0 to 3: {told}."


def _training(found: Found) -> str:
    rows = []
    for each in _of(found, "train-"):
        for result in each["results"]:
            wanted = MFU_WANTED.get(result["model"])
            peak = "-" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 2**30:.1f}"
            shares = [_percent(result["mfu_published"]), _percent(result["mfu_measured"])]
            rows.append(
                [
                    result["model"],
                    result["contestant"],
                    f"{result['tokens_per_s']:,.0f}",
                    *shares,
                    _percent(wanted),
                    peak,
                ]
            )
    titles = ("model", "", "tokens/s", "MFU", "of a large product", "MFU wanted", "peak GiB")
    return f"\n## Training\n\n{_table(titles, rows)}" if rows else ""


def _tax(found: Found) -> str:
    parts = []
    if "tax" in found:
        each = found["tax"]
        rows = [
            [name, _spread(each["step_s"][name], 1e3), _spread(ratio, 1, 3)] for name, ratio in each["ratio"].items()
        ]
        wanted = f"At most {TAX_WANTED} is wanted at stage 0."
        parts += [
            f"\n## What the engine costs in a world of one\n\n{each['model']}, autocast to bf16. {wanted}\n",
            _table(("", "ms", "to plain"), rows),
        ]
    if "busy" in found:
        titles = ("", "step ms", "device computes", "kernels", "host waits")
        rows = [
            [
                name,
                f"{seen['wall_s'] * 1e3:.2f}",
                _percent(seen["busy_share"]),
                f"{seen['num_kernels']:.0f}",
                f"{seen['num_host_waits']:.1f}",
            ]
            for name, seen in found["busy"]["contestants"].items()
        ]
        parts.append(f"\nUnder the profiler, a step:\n\n{_table(titles, rows)}")
    return "\n".join(parts)


def _overlap(found: Found) -> str:
    if "overlap" not in found:
        return ""
    each = found["overlap"]
    titles = ("", "alone ms", "with copies ms", "the copies ms", "hidden")
    rows = [
        [
            name,
            *(_spread(seen[key], 1e3) for key in ("alone_s", "beside_s", "copies_s")),
            _percent(seen["hidden_share"]),
        ]
        for name, seen in each["stages"].items()
    ]
    what = f"{each['model']}, a rank of {each['world']} alone. In the place of each collective its bytes are copied "
    what += f"{each['times']} times on the stream that would carry it; the traces are beside the results."
    return f"\n## What of collectives is hidden\n\n{what}\n\n{_table(titles, rows)}"


def _graphs(found: Found) -> str:
    if "graphs" not in found:
        return ""
    rows = []
    for name, seen in found["graphs"]["contestants"].items():
        graph = seen.get("error", "-") if seen["graph_s"] is None else _spread(seen["graph_s"], 1e3)
        same = {None: "-", True: "yes", False: "NO"}[seen["same_loss"]]
        rows.append([name, _spread(seen["eager_s"], 1e3), graph, same])
    titles = ("", "launched one by one, ms", "one graph, ms", "same losses")
    what = f"{found['graphs']['model']}, a world of one, the whole step with its update."
    return f"\n## A step as a CUDA graph\n\n{what}\n\n{_table(titles, rows)}"


def _compiled(found: Found) -> str:
    """The most of each kernel's variants, on each device."""
    if "compiled" not in found:
        return ""
    keys = ("registers", "spilled_bytes", "shared_bytes")
    most: dict[str, dict[int, list[int]]] = {}
    for row in found["compiled"]["rows"]:
        seen = most.setdefault(f"{row['module']}.{row['name']}", {}).setdefault(row["capability"], [0, 0, 0])
        seen[:] = [max(old, row[key]) for old, key in zip(seen, keys, strict=True)]
    devices = sorted({device for each in most.values() for device in each})
    titles = ["kernel", *(f"sm_{device}" for device in devices)]
    rows = [[name, *(" / ".join(map(str, each.get(device, "-"))) for device in devices)] for name, each in most.items()]
    what = "Registers of a thread / bytes spilled / bytes of shared memory: the most of a kernel's variants."
    return f"\n## Kernels as compiled\n\n{what}\n\n{_table(titles, rows)}"


def _float8(found: Found) -> str:
    if "fp8" not in found:
        return ""
    titles = ("product", "tokens x inputs x outputs", "", "us", "TFLOP/s", "of bf16's time", "error")
    rows = [
        [
            row["product"],
            row["shape"],
            row["how"],
            _spread(row["time_s"], 1e6, 1),
            f"{row['flops_per_s'] / 1e12:,.1f}",
            f"{row['of_bf16']:.2f}",
            f"{row['error']:.2%}",
        ]
        for row in found["fp8"]["rows"]
    ]
    what = (
        "Forward's product, e4m3 with a scale for each tensor. A plan takes products of blocks as 0.67 of bf16's time."
    )
    return f"\n## Products in 8 bits\n\n{what}\n\n{_table(titles, rows)}"


def _memory(found: Found) -> str:
    rows = [
        [
            each["world"],
            row["stage"],
            *(f"{row[key] / 2**20:,.1f}" for key in ("planned", "measured", "reserved")),
            f"{row['measured'] / row['planned']:.3f}",
        ]
        for each in sorted(_of(found, "memory-"), key=lambda each: each["world"])
        for row in each["rows"]
    ]
    titles = ("ranks", "stage", "planned MiB", "measured", "reserved", "ratio")
    wanted = f"Within {PLAN_WANTED:.0%} is wanted."
    return (
        f"\n## Peak memory beside the plan\n\nOne rank of a world, alone. {wanted}\n\n{_table(titles, rows)}"
        if rows
        else ""
    )


def _saving(found: Found) -> str:
    if "saving" not in found:
        return ""
    each = found["saving"]
    keys = ("step_s", "stall_s", "beside_s", "total_s", "load_s")
    rows = [[key.removesuffix("_s"), _spread(each[key], 1e3)] for key in keys]
    size = f"{each['num_bytes'] / 2**20:,.0f} MiB"
    return f"\n## Checkpoints\n\n{each['model']}, {size}; milliseconds.\n\n{_table(('', 'ms'), rows)}"


def _kernels(found: Found) -> str:
    told = [f"- {line}" for each in _of(found, "kernels-") for line in each["targets"]]
    titles = ("operation", "shape", "dtype", "", "us", "of copy", "times eager")
    rows = []
    for each in _of(found, "kernels-"):
        for row in each["rows"]:
            who, microseconds = f"{row['contestant']}, {row['mode']}", f"{row['seconds'] * 1e6:.1f}"
            speed = [_percent(row["of_copy"]), f"{row['times_eager']:.2f}"]
            rows.append([row["operation"], row["shape"], row["dtype"], who, microseconds, *speed])
    return "\n".join(["\n## Kernels\n", *told, "", _table(titles, rows)]) if rows else ""


def _strategies(found: Found) -> str:
    rows = [
        [each["world"], name, _spread(seen["tokens_per_s"], 1, 0) if "tokens_per_s" in seen else seen["error"]]
        for each in _of(found, "strategies-")
        for name, seen in each["strategies"].items()
    ]
    return f"\n## Several GPUs\n\n{_table(('GPUs', 'strategy', 'tokens/s'), rows)}" if rows else ""


def draw(found: Found, folder: Path) -> list[tuple[str, str]]:
    """Bars for training and memory; the files' names, each with what it shows."""
    if find_spec("matplotlib") is None:
        return []
    trained = {
        f"{result['model']}\n{result['contestant']}": (result["mfu_published"] or 0.0) * 100 or result["tokens_per_s"]
        for each in _of(found, "train-")
        for result in each["results"]
    }
    planned = {
        f"{each['world']}\nzero{row['stage']}": row["measured"] / row["planned"]
        for each in sorted(_of(found, "memory-"), key=lambda each: each["world"])
        for row in each["rows"]
    }
    on_gpu = any(each["environment"].get("gpu") for each in found.values())
    drawn = []
    for name, bars, what in (
        ("gpu-training.png", trained, "MFU, %" if on_gpu else "tokens/s, toys"),
        ("gpu-memory.png", planned, "peak memory: measured / planned, by ranks and stage"),
    ):
        if bars:
            _bars(folder / name, bars, what)
            drawn.append((name, what))
    return drawn


def _bars(path: Path, bars: dict[str, float], what: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.6 * len(bars)), 3.6), layout="constrained")
    axes.bar(list(bars), list(bars.values()), color="#4269d0")
    axes.set_title(what, loc="left")
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
