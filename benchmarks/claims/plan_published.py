"""Is the planner right about other people's machines? Published runs, planned, and the ratio of the two.

    python benchmarks/claims/plan_published.py                        # the table of docs/plan-accuracy.md
    python benchmarks/claims/plan_published.py --set validation       # only what no number was taken from
    python benchmarks/claims/plan_published.py --rows --json published.json
    python benchmarks/claims/plan_published.py --collectives          # bus bandwidths of NCCL, some seconds

Each file of ``benchmarks/claims/published/`` is one source: where it was read, the models' shapes, a row for each run.
A source is ``calibration`` (the planner's rates may be fitted to it) or ``validation`` (none may), not both.
The ratio is predicted / published: tokens/s/GPU above 1 promises too much, memory below 1 too little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.host import process

process.prepare_torch()

import torch  # noqa: E402

from zeroshard.kernels import Choice  # noqa: E402
from zeroshard.lab.planner.planner import planner_for  # noqa: E402
from zeroshard.lab.predict.cluster import Cluster  # noqa: E402
from zeroshard.lab.predict.hardware import find_link  # noqa: E402
from zeroshard.lab.predict.rates import Attention, Impl, Loss  # noqa: E402
from zeroshard.models import build_model  # noqa: E402

FOLDER = Path(__file__).with_name("published")
GIB, MIB, GB = 2**30, 2**20, 10**9
SEQ_BOUNDS = (2048, 4096, 8192, 16384)
ALL_SIZES = range(2**50)
SIZES = (range(MIB + 1), range(MIB + 1, 32 * MIB), range(32 * MIB, 2**50))  # of messages: tables tell them apart


@dataclass(frozen=True)
class Case:
    """A published run.

    Attributes:
        family, set: of its source.
        model: its name there.
        overrides: of the preset ``preset``, its shape.
        impl: who computed: ``eager`` (torch, operation by operation), ``compile`` or ``kernels`` (written by hand).
        attention: which fused kernel; FlashAttention-2 where it is not said.
        kernels: ``triton``: eager code with a fused loss.
        tokens_per_s: of one GPU; 0 where it is not given, or measured on something that was not described.
        memory_bytes: the peak; 0 where it is not given.
        memory_is: what was read: bytes that torch's allocator had ``allocated`` (or active), those that it had
            ``reserved``, or the whole ``card`` (nvidia-smi).
        loss: how logits became a loss, as `Software` has it; by ``impl`` where it is not said.
        weights: dtype of the weights that the optimizer updates: ``bfloat16`` has no masters.
        reshard: whether weights are freed after forward.
        autocast: whether weights and gradients are fp32, and cast around forward.
        kept_beside: what its code keeps of each compiled block that ours does not, in 16 bits: ``joint qkv``, the
            queries and keys of one product before they are rotated; ``expanded kv``, keys and values repeated for all
            heads.
        units: ``blocks``, or ``all``: embedding and head are units of their own.
    """

    family: str
    set: str
    model: str
    preset: str
    overrides: Mapping[str, Any] = field(repr=False)
    gpu: str
    gpus: int
    gpus_per_node: int
    network: str
    seq_len: int
    micro_batch: int
    num_micro: int
    stage: int
    shard_size: int
    recompute: str
    reduce_dtype: str
    impl: Impl
    tokens_per_s: float
    memory_bytes: float = 0.0
    attention: Attention = "flash-2"
    kernels: Choice = "auto"
    memory_is: str = "reserved"
    loss: Loss | None = None
    weights: str = "float32"
    reshard: bool = True
    units: str = "blocks"
    autocast: bool = False
    kept_beside: str = ""


@dataclass(frozen=True)
class Outcome:
    """A case, and what the planner says to it."""

    case: Case
    tokens_per_s: float
    memory_bytes: float
    fits: bool

    @property
    def speed_ratio(self) -> float:
        return self.tokens_per_s / self.case.tokens_per_s

    @property
    def memory_ratio(self) -> float:
        return self.memory_bytes / self.case.memory_bytes


def read_cases(folder: Path = FOLDER) -> list[Case]:
    """All runs, source by source."""
    return [case for path in sorted(folder.glob("*.toml")) for case in _cases(tomllib.loads(path.read_text()))]


def _cases(source: dict[str, Any]) -> Iterable[Case]:
    for values in source["table"]["runs"]:
        row = {**source["defaults"], **dict(zip(source["table"]["columns"], values, strict=True))}
        shape = dict(source["models"][row["model"]])
        tokens = row["seq_len"] * row["micro_batch"] * row["num_micro"]
        yield Case(
            family=source["family"],
            set=source["set"],
            model=row["model"],
            preset=shape.pop("preset"),
            overrides=shape,
            gpu=row["gpu"],
            gpus=row["gpus"],
            gpus_per_node=row["gpus_per_node"],
            network=source.get("networks", {}).get(row["gpu"]) or row["network"],
            seq_len=row["seq_len"],
            micro_batch=row["micro_batch"],
            num_micro=row["num_micro"],
            stage=row["stage"],
            shard_size=row.get("shard_size", row["gpus"]),
            recompute=row["recompute"],
            reduce_dtype=row.get("reduce_dtype", "float32"),
            impl=row["impl"],
            tokens_per_s=_tokens_per_s(row, shape, tokens),
            memory_bytes=row.get("memory_gib", 0) * GIB + row.get("memory_mib", 0) * MIB + row.get("memory_gb", 0) * GB,
            attention=row.get("attention", "flash-2"),
            kernels=row.get("kernels", "auto"),
            memory_is=row.get("memory_is", "reserved"),
            loss=row.get("loss"),
            weights=row.get("weights", "float32"),
            reshard=row.get("reshard", True),
            units=row.get("units", "blocks"),
            autocast=row.get("autocast", False),
            kept_beside=row.get("kept_beside", ""),
        )


def _tokens_per_s(row: Mapping[str, Any], shape: Mapping[str, Any], tokens: int) -> float:
    """Of one GPU, from whichever of five forms the source has; 0 where it has none."""
    if "tokens_per_s" in row:
        return row["tokens_per_s"]
    if "tokens_per_s_all" in row:
        return row["tokens_per_s_all"] / row["gpus"]
    if "step_s" in row:
        return tokens / row["step_s"]
    if "num_params" not in row:
        return 0.0
    attention = shape.get("n_layer", 32) * row["seq_len"] * shape.get("n_embd", 4096)
    if "model_flops_per_s" in row:  # forward and backward, under the causal mask
        return row["model_flops_per_s"] / (6 * row["num_params"] + 6 * attention)
    return row["hfu_flops_per_s"] / (8 * row["num_params"] + 16 * attention)  # forward twice, no mask


def outcome_of(case: Case) -> Outcome:
    """Plan one case, with its own stage, micro-batch and accumulation."""
    overrides = {"seq_len": case.seq_len, **case.overrides, "activation_checkpointing": case.recompute}
    if overrides["seq_len"] < case.seq_len:
        overrides["seq_len"] = case.seq_len
    planner = planner_for(
        **_model_of(case, overrides),
        world_size=case.gpus,
        gpu=case.gpu,
        network=case.network,
        gpus_per_node=case.gpus_per_node,
        global_batch=case.micro_batch * case.num_micro * case.gpus,
        seq_len=case.seq_len,
        reduce_dtype=case.reduce_dtype,
        reshard_after_forward=case.reshard,
        impl=case.impl,
        attention=case.attention,
        loss=case.loss or ("compiled" if case.impl == "compile" else None),
        autocast=case.autocast,
    )
    row = planner.row(case.stage, case.micro_batch, case.shard_size)
    beside = {"allocated": row.process.allocated, "reserved": row.process.reserved, "card": row.process.total}
    num_bytes = row.step.peak.total + beside[case.memory_is] + _kept_beside(case, planner.workload.model.config)
    return Outcome(case, row.tokens_per_s / case.gpus, num_bytes, row.fits)


def _kept_beside(case: Case, config: Any) -> int:
    """Bytes of all blocks, which keep nothing of it where they are recomputed."""
    if not case.kept_beside or case.recompute != "none" or case.impl != "compile":
        return 0
    kv = config.n_embd // config.n_head * config.n_kv_head
    columns = {"joint qkv": config.n_embd + kv, "expanded kv": 2 * (config.n_embd - kv)}[case.kept_beside]
    return 2 * case.micro_batch * case.seq_len * columns * config.n_layer


def _model_of(case: Case, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The model without values, in the weights and units that were published."""
    kernels: Choice = "reference" if case.impl == "eager" and case.kernels == "auto" else case.kernels
    with torch.device("meta"):
        model = build_model(case.preset, overrides=overrides, kernels=kernels).to(getattr(torch, case.weights))
    return {"model": model, "kernels": kernels, "units": list(model.blocks) if case.units == "blocks" else model.units}


def summary(outcomes: list[Outcome]) -> list[list[str]]:
    """Rows of the table: groups, and of each how far predictions are from what was published."""
    rows = []
    for name, group in _groups(outcomes):
        speeds = [each.speed_ratio for each in group if each.case.tokens_per_s]
        memories = [each.memory_ratio for each in group if each.case.memory_bytes]
        rows.append(
            [
                name,
                str(len(group)),
                *(_spread(speeds, 0.15) if speeds else ["", "", ""]),
                str(len(memories)) if memories else "",
                *(_spread(memories, 0.08) if memories else ["", "", ""]),
                f"{sum(each.fits for each in group)} of {len(group)}",
            ]
        )
    return rows


def _spread(ratios: list[float], within: float) -> list[str]:
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    good = sum(abs(ratio - 1) <= within for ratio in ratios)
    return [f"{statistics.median(ratios):.2f}", f"{worst:.2f}", f"{good} of {len(ratios)}"]


def _groups(outcomes: list[Outcome]) -> Iterable[tuple[str, list[Outcome]]]:
    for kind in ("calibration", "validation"):
        of_kind = [each for each in outcomes if each.case.set == kind]
        if not of_kind:
            continue
        yield f"**{kind}**", of_kind
        keys: list[Callable[[Case], str]] = [
            lambda case: case.family,
            lambda case: case.gpu,
            lambda case: case.impl,
            lambda case: f"up to {next((b for b in SEQ_BOUNDS if case.seq_len <= b), 65536):,} tokens",
            lambda case: "one node" if case.gpus <= case.gpus_per_node else "several nodes",
        ]
        for key in keys:
            names = dict.fromkeys(key(each.case) for each in of_kind)
            if len(names) > 1:
                yield from ((name, [each for each in of_kind if key(each.case) == name]) for name in names)


@dataclass(frozen=True)
class Collectives:
    """Bus bandwidths that one source measured.

    Attributes:
        set, title, url: of the source.
        runs: rows with ``op, num_bytes, ranks, per_node, within, between, busbw``; GB/s as nccl-tests counts them.
    """

    set: str
    title: str
    url: str
    runs: list[dict[str, Any]]

    def ratios(self, op: str = "", sizes: range = ALL_SIZES) -> list[float]:
        """Predicted / measured, of ``op`` or of all, and of buffers of so many bytes."""
        chosen = [run for run in self.runs if op in ("", run["op"]) and run["num_bytes"] in sizes]
        return [_bus_bandwidth(run) / run["busbw"] for run in chosen]


def read_collectives(folder: Path = FOLDER) -> list[Collectives]:
    """Of each source."""
    found = []
    for path in sorted((folder / "collectives").glob("*.toml")):
        content = tomllib.loads(path.read_text())
        for source in content["sources"]:
            runs = [dict(zip(content["columns"], row, strict=True)) for row in source["runs"]]
            found.append(Collectives(source["set"], source["title"], source["url"], runs))
    return found


def _bus_bandwidth(run: Mapping[str, Any]) -> float:
    """GB/s (10^9) of one collective by the planner."""
    ranks = run["ranks"]
    cluster = Cluster(ranks, run["per_node"], find_link(run["within"]), find_link(run["between"]))
    rounds = 2 if run["op"] == "all_reduce" else 1
    return (
        rounds * (ranks - 1) / ranks * run["num_bytes"] / cluster.collective_s(run["op"], run["num_bytes"], ranks) / GB
    )


def collectives_table(sources: list[Collectives]) -> str:
    """As Markdown: each source and operation, and how far predictions are."""
    lines = ["| source | set | operation | ranks | sizes | runs | median | worst | within 20 % |", "|---" * 9 + "|"]
    for source in sources:
        for op, sizes in itertools.product(dict.fromkeys(run["op"] for run in source.runs), SIZES):
            runs = [run for run in source.runs if run["op"] == op and run["num_bytes"] in sizes]
            if not runs:
                continue
            ranks, found = ({run[key] for run in runs} for key in ("ranks", "num_bytes"))
            title = f"[{source.title}]({source.url})" if source.url else source.title
            told = [title, source.set, op, _from_to(ranks), _sizes(found), str(len(runs))]
            lines.append("| " + " | ".join([*told, *_spread(source.ratios(op, sizes), 0.2)]) + " |")
    return "\n".join(lines)


def _from_to(values: set[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _sizes(values: set[int]) -> str:
    told = [f"{num // MIB:,} MiB" if num >= MIB else f"{num:,} B" for num in (min(values), max(values))]
    return " to ".join(dict.fromkeys(told))


HEAD = ["", "runs", "speed: median", "worst", "within 15 %", "memory: runs", "median", "worst", "within 8 %", "fits"]


def table(rows: list[list[str]]) -> str:
    """As Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *rows])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("calibration", "validation"), help="only these; both otherwise")
    parser.add_argument("--family", help="only this source")
    parser.add_argument("--rows", action="store_true", help="each run too")
    parser.add_argument("--json", type=Path, help="write runs and predictions there")
    parser.add_argument("--collectives", action="store_true", help="bus bandwidths of collectives, and no runs")
    args = parser.parse_args(argv)
    if args.collectives:
        print(collectives_table([source for source in read_collectives() if args.set in (None, source.set)]))
        return 0
    cases = [case for case in read_cases() if args.set in (None, case.set) and args.family in (None, case.family)]
    outcomes = [outcome_of(case) for case in cases]
    if args.rows:
        for each in outcomes:
            case = each.case
            memory = f"{each.memory_ratio:5.2f}" if case.memory_bytes else "    -"
            speed = f"{each.speed_ratio:5.2f}" if case.tokens_per_s else "    -"
            print(
                f"{speed} {memory} {case.family:15} {case.model:11} {case.gpu:15} {case.gpus:4}"
                f" T {case.seq_len:5} b {case.micro_batch:2} x {case.num_micro:2} {case.recompute:9} {case.impl:8}"
                f" {case.tokens_per_s:8.0f}{'' if each.fits else '  does not fit'}"
            )
    print(table(summary(outcomes)))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
