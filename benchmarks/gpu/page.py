"""docs/gpu.md and the README's table, from the results that quarter.py left; nothing in them is typed.

    python benchmarks/gpu/page.py --plan        # puts what the planner says into the results; a minute of CPU time
    python benchmarks/gpu/page.py               # writes docs/gpu.md, and the README between its two marks
    python benchmarks/gpu/page.py --check       # writes nothing; exit status 3 where either is not what it would be

Results are ``benchmarks/gpu/results/*.jsonl``, the last by name. A line whose row has no result says "not measured".
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meanings import AXOLOTL, CONTESTANTS, KERNELS, LLMQ, LLMQ_HOW, LONG_MODEL, MEANS, NEMO, SPELLED, WHOLE
from quarter import ALONE, NEXT, ROWS, read

from zeroshard.train.profiling.flops import peak_bf16_flops_per_s

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOT_MEASURED = "not measured"
MARKS = ("<!-- made by benchmarks/gpu/page.py -->", "<!-- end -->")


class Found:
    """The records of a results file; of a row that was measured again, those of the last time that it was done."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records: list[dict[str, Any]] = []
        self.earlier: list[dict[str, Any]] = []
        for row in {record["row"]: None for record in records}:
            runs: list[list[dict[str, Any]]] = [[]]
            for record in (record for record in records if record["row"] == row):
                if "begin" in record:
                    runs.append([])
                runs[-1].append(record)
            whole = [run for run in runs if any(record.get("end") == "done" for record in run)]
            planned = [r for r in runs[-1] if "planned_bytes" in r or "planned_s" in r]
            kept = (whole or runs)[-1]
            self.earlier += [record for run in whole[:-1] for record in run]
            self.records += [*kept, *(r for r in planned if r not in kept)]

    def of(self, row: str, **given: Any) -> list[dict[str, Any]]:
        """The records of a row that have these values."""
        return [r for r in self.records if r["row"] == row and all(r.get(key) == value for key, value in given.items())]

    def median(self, row: str, key: str, **given: Any) -> float | None:
        """The median of a number over rounds; None: it was not measured."""
        values = [record[key] for record in self.of(row, **given) if record.get(key) is not None]
        return statistics.median(values) if values else None

    @property
    def environment(self) -> dict[str, Any]:
        """What the results were measured on; empty: there are none."""
        return next((record["environment"] for record in self.records if "environment" in record), {})

    @property
    def toy(self) -> bool:
        """Whether they are those of a rehearsal."""
        return any(record.get("toy") for record in self.records)


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes:
        row: whose results it shows.
        what: what is measured.
        beside: published figures, or the goal.
        value: the figure as text; None: not measured.
        readme: whether the README has it too.
    """

    row: str
    what: str
    beside: str
    value: Callable[[Found], str | None]
    readme: bool = False


def same(row: str) -> Callable[[Found], str | None]:
    """How many of a row's comparisons hold, and which do not."""

    def text(found: Found) -> str | None:
        compared = [record for record in found.of(row) if "same" in record]
        if not compared:
            return None
        wrong = [f"{r['case']} {r.get('stage', '')}".strip() for r in compared if not r["same"]]
        first = "; ".join(wrong[:2]) + (f" and {len(wrong) - 2} more" if len(wrong) > 2 else "")
        return f"{len(compared) - len(wrong)} of {len(compared)}" + (f"; not {first}" if wrong else "")

    return text


def ms(seconds: float) -> str:
    """Milliseconds to two digits: ``0.047 ms``, ``2.2 ms``, ``44.6 ms``."""
    value = seconds * 1e3
    digits = 1 if value >= 1 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f} ms"


def speed(row: str, case: str, to: str = "") -> Callable[[Found], str | None]:
    """Tokens a second, MFU, and the step's time over that of the case ``to``."""

    def text(found: Found) -> str | None:
        step_s = found.median(row, "step_s", case=case)
        if step_s is None:
            return None
        record = found.of(row, case=case, round=0)[0]
        tokens_per_s = record["tokens"] / step_s
        peak = peak_bf16_flops_per_s(found.environment.get("gpu") or "")
        mfu = f", MFU {tokens_per_s * record['flops_per_token'] / peak:.1%}" if peak else ""
        other = found.median(row, "step_s", case=to)
        beside = "the plain loop's time" if to.startswith("plain") else f"the time with {to}"
        ratio = f", {step_s / other:.2f} of {beside}" if other else ""
        before = [r["step_s"] for r in found.earlier if r["row"] == row and r.get("case") == case and "step_s" in r]
        apart = abs(statistics.median(before) / step_s - 1) if before else 0.0
        also = f"; {record['tokens'] / statistics.median(before):,.0f} in an earlier run" if apart > 0.05 else ""
        return f"{tokens_per_s:,.0f} tokens/s{mfu}{ratio}{also}"

    return text


def whole(row: str, case: str, to: str = "") -> Callable[[Found], str | None]:
    """What `speed` says of a case, and its peak memory."""

    def text(found: Found) -> str | None:
        said, peak = speed(row, case, to)(found), found.median(row, "peak_bytes", case=case)
        return f"{said}, {peak / 2**30:.1f} GiB" if said and peak else said

    return text


def over(row: str, key: str, case: str, to: str) -> Callable[[Found], str | None]:
    """The case's seconds and memory, and both over those of the case ``to``."""

    def text(found: Found) -> str | None:
        ours, theirs = (found.median(row, key, case=each) for each in (case, to))
        if ours is None or theirs is None:
            return None
        peaks = [found.median(row, "peak_bytes", case=each) for each in (case, to)]
        memory = f", {peaks[0] / 2**30:.1f} GiB ({peaks[0] / peaks[1]:.2f})" if peaks[0] and peaks[1] else ""
        return f"{ms(ours)} ({ours / theirs:.2f} of {to}){memory}"

    return text


def queued(found: Found) -> str | None:
    """A step of a rank of 8 at stage 3, and how long its host takes to queue it."""
    for record in found.of("stage 3", case="zero3"):
        if record.get("none_s"):
            host = record.get("none_queued_s")
            return f"{ms(record['none_s'])} a step" + (f", host {ms(host)}" if host else "")
    return None


def kernel(row: str, case: str, mode: str) -> Callable[[Found], str | None]:
    """Each contestant's time and rate."""

    def text(found: Found) -> str | None:
        parts = []
        for record in found.of(row, case=case, mode=mode):
            who = CONTESTANTS.get(record["contestant"], record["contestant"])
            peak = f", {record['peak_bytes'] / 2**30:.2f} GiB" if row == "loss" and record["peak_bytes"] else ""
            rate = f", {record['bytes_per_s'] / 1e9:,.0f} GB/s" if row == "norms" else ""
            parts.append(f"{who} {ms(record['seconds'])}{rate}{peak}")
        return "; ".join(parts) or None

    return text


def beside_torch(numel: int, our_case: str, their_case: str) -> Callable[[Found], str | None]:
    """The times of two cases of the row."""

    def text(found: Found) -> str | None:
        ours, theirs = (found.median("adamw", "seconds", case=case, numel=numel) for case in (our_case, their_case))
        if ours is None or theirs is None:
            return None
        return f"ours {ms(ours)}, torch's {ms(theirs)}"

    return text


def low_bit(numel: int, row: str = "adamw8bit") -> Callable[[Found], str | None]:
    """Times and rates of updates with 8-bit states."""

    def text(found: Found) -> str | None:
        parts = []
        for case in ("adamw8bit", "flash-adamw", "adamw8bit, many", "bitsandbytes", "torch fused"):
            seconds, rate = (found.median(row, key, case=case, numel=numel) for key in ("seconds", "bytes_per_s"))
            if seconds is not None and rate is not None:
                parts.append(f"{case} {ms(seconds)} ({rate / 1e12:.2f} TB/s)")
        return ", ".join(parts) or None

    return text


def peaks(found: Found) -> str | None:
    """Measured over planned peaks."""
    keys = ("model", "checkpointing", "stage", "world", "rows")
    ratios = []
    for record in (record for record in found.of("memory") if "peak_bytes" in record):
        planned = found.median("memory", "planned_bytes", **{key: record[key] for key in keys})
        if planned:
            ratios.append(record["peak_bytes"] / planned)
    return f"{min(ratios):.3f} to {max(ratios):.3f} of the plan, {len(ratios)} cases" if ratios else None


def traced(stage: int) -> Callable[[Found], str | None]:
    """What the trace of a rank of 8 says."""

    def text(found: Found) -> str | None:
        for record in found.of("overlap", case=f"zero{stage}"):
            if record.get("idle_share") is not None:
                count = record["num_host_waits"]
                waits = f"waits for it {count} times before its end" if count else "never waits for it before its end"
                beside = record["copies_s"] / record["none_s"]
                theirs = f"; FSDP2's {ms(record['fsdp2_s'])}" if "fsdp2_s" in record else ""
                return (
                    f"{ms(record['none_s'])} without collectives, {beside:.2f} of it with them{theirs}; the GPU is "
                    f"idle for {record['idle_share']:.0%} of a traced step; the host {waits}"
                )
        return None

    return text


def times(found: Found) -> str | None:
    """Planned over measured times of steps."""
    parts = []
    for record in found.records:
        if "planned_s" in record:
            measured = found.median(record["row"], "step_s", case=record["case"])
            if measured:
                parts.append(f"{SPELLED.get(record['case'], record['case'])}: {record['planned_s'] / measured:.2f}")
    return "; ".join(parts) or None


def kernels(case: str) -> Callable[[Found], str | None]:
    """How long the GPU works on one micro-batch and an update, and how long its host takes to issue them."""

    def text(found: Found) -> str | None:
        for record in found.of("breakdown", case=case):
            if record.get("by_kind"):
                host, step = ms(record["queued_1_s"]), ms(record["step_1_s"])
                return f"kernels {record['kernels_ms']:.1f} ms, host {host}, step {step}"
        return None

    return text


def long_step(tokens: int) -> Callable[[Found], str | None]:
    """Tokens a second of a sequence of this length, and the peak over the planned one."""

    def text(found: Found) -> str | None:
        given: dict[str, Any] = {"case": f"{LONG_MODEL}, {tokens} tokens"}
        step_s, peak = (found.median("long sequences", key, **given) for key in ("step_s", "peak_bytes"))
        if step_s is None or peak is None:
            return None
        planned = found.median("long sequences", "planned_bytes", **given)
        of = f", {peak / planned:.3f} of the plan" if planned else ""
        return f"{tokens / step_s:,.0f} tokens/s, {peak / 2**30:.1f} GiB{of}"

    return text


def longest(found: Found) -> str | None:
    """The longest sequence that a limited card took, and the one that it did not, beside the plan."""
    for card in found.of("long sequences", case="memory"):
        tried = found.of("long sequences", limited=True)
        took = [record["tokens"] for record in tried if "peak_bytes" in record]
        over = [record["tokens"] for record in tried if record.get("out_of_memory")]
        most = f"{max(took):,} tokens" if took else "none"
        return (
            f"planned {card['planned_tokens']:,} tokens for a card of {card['card_bytes'] / 2**30:.1f} GiB; "
            f"it took {most}" + (f", and not {min(over):,}" if over else "")
        )
    return None


def away(num_micro: int) -> Callable[[Found], str | None]:
    """A step with the optimizer on the host beside one with it on the device."""

    def text(found: Found) -> str | None:
        case = "qwen3-0.6b, optimizer on the {}"
        here, there = (
            found.of("offload", case=case.format(where), num_micro=num_micro) for where in ("device", "host")
        )
        if not here or not there:
            return None
        sizes = " and ".join(
            f"{each[0]['step_s']:.2f} s, {each[0]['peak_bytes'] / 2**30:.2f} GiB" for each in (here, there)
        )
        return f"{sizes} with it on the host"

    return text


def seven_billion(found: Found) -> str | None:
    """Steps of Llama 7B, by the number of micro-batches."""
    records = found.of("offload 7b", case="llama-7b, optimizer on the host")
    parts = [
        f"{r['tokens']:,} tokens a step: {r['tokens_per_s']:,.0f} tokens/s, {r['flops_per_s'] / 1e12:.0f} TFLOP/s, "
        f"{r['peak_bytes'] / 2**30:.1f} GiB"
        for r in records
        if "tokens_per_s" in r
    ]
    return "; ".join(parts) or None


NORM, LOSS = "rms_norm 4096 x {} bfloat16", "linear_cross_entropy 8192 x {} bfloat16"
LIGER = "Liger's own figures: forward 2,300 to 2,800 GB/s, backward 670 to 880; QuACK 3,010"
LINES = (
    Line("gpt2 whole", "GPT-2 124M, plain loop, compiled whole", "llm.c: 40.2 %", whole("gpt2 whole", WHOLE)),
    *(Line("gpt2 whole", f"under stage {stage}, on one GPU", "at most 1.02 of the plain loop; 450,000 tokens/s",
           whole("gpt2 whole", f"zero{stage}, compile whole", WHOLE)) for stage in (1, 3)),
    Line("stage 3", "step of one rank of 8 at stage 3, 16 rows", "below 60 ms; 82.9 before, FSDP2's 106.1", queued),
    *(Line(f"qwen {size}b", f"Qwen2.5-{size}B compiled whole, {num_rows} rows",
           f"llmq {LLMQ[f'qwen2.5-{size}b']:,} tokens/s", whole(f"qwen {size}b", f"qwen2.5-{size}b, {num_rows} rows"))
      for size in ("0.5", "1.5") for num_rows in (32, 16)),
    Line("bf16 states", "Qwen2.5-0.5B, 32 rows, both moments in bf16", f"llmq {LLMQ['qwen2.5-0.5b']:,} tokens/s",
         whole("bf16 states", "qwen2.5-0.5b, 32 rows, state_format bf16")),
    Line("our kernels", "GPT-2 124M compiled whole, no kernel of ours", "", whole("our kernels", "none ours")),
    Line("our kernels", "with our loss", "", whole("our kernels", "the loss", "none ours")),
    Line("our kernels", "with all of our kernels", "", whole("our kernels", "all ours", "none ours")),
    Line("fp8", "blocks of a 7B, products in bfloat16", "", whole("fp8", "bfloat16")),
    Line("fp8", "products in 8 bits", "", whole("fp8", "fp8", "bfloat16")),
    Line("packed rows", "rows of 8,192 tokens, one document", "", whole("packed rows", "one document")),
    *(Line("packed rows", f"eight documents, {case}", "memory within 1.05 of one document" if "blocks" in case else "",
           over("packed rows", "step_s", case, "one document")) for case in ("by blocks", "by a mask")),
    *(Line("muon", f"an update of {name} by Muon", "", over("muon", "seconds", f"{name}, muon", f"{name}, adamw"))
      for name in ("gpt2-124m", "gpt2-1.5b")),
    Line("right", "weights equal to a plain loop's, to the bit, at each stage", "all", same("right"), readme=True),
    Line("kernels right", "kernels within their bounds of the reference in fp32", "all", same("kernels right"),
         readme=True),
    Line("gpt2-124m", "GPT-2 124M, plain loop, compiled blocks", "nanoGPT 324 TFLOP/s: 32.8 %; llm.c: 40.2 %",
         speed("gpt2-124m", "plain, compile"), readme=True),
    Line("gpt2-124m", "GPT-2 124M, plain loop, compiled whole", "the same", speed("gpt2-124m", WHOLE, "plain, compile"),
         readme=True),
    Line("gpt2-124m", "compiled blocks under stage 1, on one GPU", "1.00 of the plain loop",
         speed("gpt2-124m", "zero1, compile", "plain, compile"), readme=True),
    Line("gpt2-124m", "compiled blocks under FSDP2, on one GPU", "",
         speed("gpt2-124m", "fsdp2, compile", "plain, compile"), readme=True),
    Line("gpt2-124m", "GPT-2 124M, plain loop, eager", "", speed("gpt2-124m", "plain, eager")),
    Line("gpt2-124m", "under stage 1, eager", "", speed("gpt2-124m", "zero1, eager", "plain, eager")),
    Line("gpt2-124m", "under FSDP2, eager", "", speed("gpt2-124m", "fsdp2, eager", "plain, eager")),
    Line("gpt2-124m", "under stage 1 with our kernels, eager", "", speed("gpt2-124m", KERNELS, "plain, eager")),
    *(Line("norms", f"RMSNorm, {mode}, 4096 x {width}, bf16", LIGER, kernel("norms", NORM.format(width), mode),
           readme=width == 8192) for width in (4096, 8192, 16384) for mode in ("forward", "backward")),
    Line("adamw", "search for what a user wrote into bf16 weights, 1.5 B", "",
         beside_torch(1_558_000_000, "written, ours", "written, torch")),
    Line("adamw8bit", "AdamW with 8-bit states, 124 M parameters", "torch's fused, fp32 states",
         low_bit(124_000_000)),
    Line("adamw8bit", "AdamW with 8-bit states, 774 M", "torch's fused, fp32 states", low_bit(774_000_000)),
    Line("bitsandbytes", "AdamW with 8-bit states, 124 M parameters", "", low_bit(124_000_000, "bitsandbytes")),
    Line("loss", "cross-entropy alone, 8192 tokens x 131,072 words", "Liger 2.97 ms",
         kernel("loss", "cross_entropy 8192 x 131072 bfloat16", "both")),
    Line("loss", "linear layer and loss, 8192 tokens x 768 x 50,257", "",
         kernel("loss", LOSS.format("768 x 50257"), "both")),
    Line("loss", "linear layer and loss, 8192 tokens x 4096 x 131,072", "",
         kernel("loss", LOSS.format("4096 x 131072"), "both"), readme=True),
    Line("memory", "peak memory of one rank of 1, 8 and 64, GPT-2 124M and 1.5B", "within 3 % of the plan", peaks,
         readme=True),
    *(Line("overlap", f"step of one rank of 8, stage {stage}, copies for collectives", "no wait in mid-step",
           traced(stage), readme=stage == 3) for stage in (1, 2, 3)),
    Line("qwen", "Qwen2.5-0.5B, transformers' code", f"llmq {LLMQ['qwen2.5-0.5b']:,} tokens/s, {LLMQ_HOW}",
         speed("qwen", "qwen2.5-0.5b"), readme=True),
    Line("qwen", "Qwen2.5-1.5B, transformers' code", f"llmq {LLMQ['qwen2.5-1.5b']:,} tokens/s, likewise",
         speed("qwen", "qwen2.5-1.5b"), readme=True),
    Line("device", "planned over measured time of a step", "0.90 to 1.10", times),
    *(Line("breakdown", f"{SPELLED[case]}, stage 1, one micro-batch of 16 rows and an update", "", kernels(case))
      for case in ("zero1, eager", "zero1, compile", "qwen2.5-0.5b")),
    *(Line("offload", f"Qwen3-0.6B, {4096 * num_micro:,} tokens a step", f"NeMo-RL {NEMO}" if num_micro == 1 else "",
           away(num_micro), readme=num_micro == 1) for num_micro in (1, 8)),
    Line("offload 7b", "Llama 7B, all of the optimizer on the host", f"llmq {LLMQ['7b']:,} tokens/s, all in bf16, "
         "nothing on the host; MegaTrain 272 TFLOP/s", seven_billion),
    *(Line("long sequences", f"Qwen3-8B, adapters of rank 16, one sequence of {tokens:,} tokens", f"Axolotl {theirs}",
           long_step(tokens), readme=tokens > 30_000) for tokens, theirs in AXOLOTL.items()),
    Line("long sequences", "the longest sequence, in the memory for which 65,536 tokens are planned", "the plan",
         longest),
)  # fmt: skip


def machine(found: Found) -> str:
    """A sentence on what was measured where."""
    facts = found.environment
    if not facts:
        return "Nothing has been measured on a GPU yet."
    if found.toy or not facts["gpu"]:
        return "A rehearsal with toy models: no figure claims anything."
    return (
        f"Measured on one {facts['gpu']}, torch {facts['torch']}, Triton {facts['triton']}, Python {facts['python']}."
    )


def table(lines: list[Line], found: Found) -> str:
    """A table of lines."""
    rows = [f"| {line.what} | {line.value(found) or NOT_MEASURED} | {line.beside} |" for line in lines]
    return "\n".join(["| what | measured | beside |", "|---|---|---|", *rows])


def page(found: Found) -> str:
    """The text of docs/gpu.md."""
    ends = {record["row"]: record["end"] for record in found.records if "end" in record}
    sections = []
    for row in (*ROWS[len(NEXT) :], *ALONE, *NEXT):
        lines = [line for line in LINES if line.row == row.name]
        if not lines:
            continue
        text = table(lines, found)
        end = ends.get(row.name, "done")
        note = "" if end == "done" else f"\nThis row did not end: {end}.\n"
        means = MEANS[row.name](found) if row.name in MEANS and not found.toy else ""
        told = f"\n{means}\n" if means else ""
        sections.append(f"## {row.name}\n\n{row.about[0].upper()}{row.about[1:]}.\n{note}{told}\n{text}\n")
    return f"""# On a GPU

{machine(found)}

`benchmarks/gpu/quarter.py` measures this in a quarter of an hour on one H100 or H200, and `benchmarks/gpu/page.py`
writes this page; `benchmarks/gpu/README.md` says how to run both. Steps are of 524,288 tokens in bf16, of sequences of
1,024 tokens, with gradients clipped at a norm of 1.0; figures are medians of interleaved rounds. MFU counts
6 N + 12 L d T FLOPs a token against the card's dense bf16 rate as published.

""" + "\n".join(sections)


def readme(text: str, found: Found) -> str:
    """The README with its table replaced."""
    begin, end = (re.escape(mark) for mark in MARKS)
    body = f"{machine(found)}\n\n{table([line for line in LINES if line.readme], found)}"
    new, count = re.subn(f"({begin}\n).*?(\n{end})", lambda m: f"{m[1]}{body}{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"error: README.md: it has {count} places between {MARKS[0]} and {MARKS[1]}; give it one")
    return new


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = sorted((HERE / "results").glob("*.jsonl"))
    parser.add_argument("--results", type=Path, default=results[-1] if results else None, help="a results file")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu.md", help="the page")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the file whose table is replaced")
    parser.add_argument("--plan", action="store_true", help="put the planner's figures into the results, and end")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 3 where a file differs")
    args = parser.parse_args()
    if args.plan if args.results is None else not args.results.exists():
        print(f"error: --results: there is no {args.results or 'results file'}; run quarter.py first", file=sys.stderr)
        return 2
    records = read(args.results) if args.results else []
    if args.plan:
        from plans import planned

        measured = [record for record in records if not {"planned_bytes", "planned_s"} & record.keys()]
        found = [*measured, *planned(Found(measured).records)]
        args.results.write_text("".join(json.dumps(record) + "\n" for record in found), encoding="utf-8")
        return 0
    found = Found(records)
    wanted = {args.out: page(found), args.readme: readme(args.readme.read_text(encoding="utf-8"), found)}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if args.check:
        for path in stale:
            print(f"{path} is not what benchmarks/gpu/page.py makes of the results; run it", file=sys.stderr)
        return 3 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
