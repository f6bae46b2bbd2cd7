"""Everything that only a GPU can say, in a quarter of an hour: a list of rows, the most valuable first.

    python benchmarks/gpu/quarter.py --seconds 480 --out results.jsonl      # what fits into eight minutes
    python benchmarks/gpu/quarter.py --seconds 200 --out results.jsonl      # then what failed or is left
    python benchmarks/gpu/quarter.py --only norms adamw --again             # these, although they are done
    python benchmarks/gpu/quarter.py --rehearse --out rehearsal.jsonl       # every row at toy size, without a GPU

A worker process measures rows one after the other and appends each result to one JSON-lines file at the moment that it
exists, so a command that is killed loses only the row that it was measuring. Rows that share a worker share torch's
start and what torch.compile has warmed up. A row that fails, hangs or dies costs its worker, and the next row gets a
new one. No row starts that would end after ``--seconds``. ``page.py`` makes docs/gpu.md and the README's table of the
file.

Exit status: 0 every row that was asked for is done; 1 some failed or were left for later; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NO_GPU = "no GPU"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: also the name of its function in rows.py, with ``_`` for each other character.
        seconds: that it should take; it starts only if these are left, and fits what it repeats into them.
        limit_s: after which its worker is killed.
        about: what it says.
        worker: rows of one worker's name share a process.
    """

    name: str
    seconds: float
    limit_s: float
    about: str
    worker: str = "speed"


# What no GPU has measured yet: the first command of the next quarter.
NEXT = (
    Row("gpt2 whole", 58, 120, "tokens/s of GPT-2 124M compiled whole: a plain loop, ours at stages 1 and 3", "whole"),
    Row("stage 3", 20, 60, "a step of one rank of 8 at stage 3, 16 rows: seconds, and until the host has queued it"),
    Row("qwen 0.5b", 58, 120, "tokens/s of Qwen2.5-0.5B compiled whole, 32 and 16 rows", "whole"),
    Row("qwen 1.5b", 59, 150, "tokens/s of Qwen2.5-1.5B compiled whole, 32 and 16 rows", "whole"),
    Row("bf16 states", 55, 120, "Qwen2.5-0.5B compiled whole with both moments in bf16 and 32 rows", "whole"),
    Row("our kernels", 58, 120, "GPT-2 124M compiled whole by each choice of kernels: none, the loss, all", "whole"),
    Row("fp8", 50, 120, "blocks of a 7B, compiled: products in 8 bits beside bfloat16", "whole"),
    Row("packed rows", 50, 120, "rows of 8,192 tokens: one document, several by blocks, several by a mask", "whole"),
    Row("muon", 20, 60, "updates of GPT-2 124M and 1.5B by Muon, beside AdamW"),
)
ROWS = (
    *NEXT,
    Row("right", 40, 120, "the bits of a plain loop, at every stage, by null ranks, by two ranks over gloo", "bits"),
    Row("kernels right", 40, 120, "every kernel against its reference, forward and backward", "bits"),
    Row("gpt2-124m", 115, 210, "tokens/s and MFU: plain loop, ours at stage 1, FSDP2; eager and compiled"),
    Row("norms", 40, 90, "GB/s of RMSNorm and LayerNorm beside eager and torch.compile"),
    Row("adamw", 10, 40, "torch's fused AdamW, and our search for writes before it"),
    Row("adamw8bit", 15, 40, "AdamW with 8-bit states beside torch's fused AdamW"),
    Row("loss", 20, 60, "linear layer and cross-entropy: time and peak memory beside eager"),
    Row("host", 8, 40, "microseconds of Python for an operation, forward and backward"),
    Row("memory", 35, 90, "the allocator's peak in a step, for a rank of 1, 8 and 64"),
    Row("overlap", 20, 60, "a traced step of a rank of 8, with copies in the place of collectives"),
    Row("qwen", 55, 150, "tokens/s of Qwen2.5-0.5B and 1.5B"),
    Row("device", 15, 60, "the rates that zeroshard plan reads"),
    Row("breakdown", 25, 70, "kernels of a step by kind, and how long the host takes to queue it"),
    Row("offload", 25, 80, "steps with the optimizer's state on the host, of Qwen3-0.6B"),
    Row("peak blocks", 15, 50, "the largest blocks of memory at a step's peak"),
)
# Each for a command of its own, by ``--only``: most of its time; the first one needs 108 GB of host memory.
ALONE = (
    Row("bitsandbytes", 20, 60, "AdamW with 8-bit states beside that of bitsandbytes", worker="bitsandbytes"),
    Row("offload 7b", 110, 240, "tokens/s of Llama 7B on one GPU, the optimizer's state on the host"),
    Row("long sequences", 220, 400, "adapters of Qwen3-8B's shape at 16k and 32k tokens, and the longest that fits"),
)
# What a rehearsal adds: each must lose itself alone. The killed one dies as by the system's out-of-memory killer.
PLANTED = (
    Row("planted failure", 4, 20, "raises"),
    Row("planted hang", 4, 4, "never ends"),
    Row("planted out of memory", 4, 20, "allocates an exbibyte"),
    Row("planted kill", 4, 20, "is killed"),
)


# ----------------------------------------------------------------------------------------------------------- worker


def work(out: Path) -> int:
    """Run the rows whose names arrive on standard input, ``NAME<tab>SECONDS`` a line; answer with a line each."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints goes into the log and is no answer
    import rows
    import whole_models

    if rows.MAY_RUN:
        rows.environment_of(Results(out, "machine"))
    for line in sys.stdin:
        if not rows.MAY_RUN:
            answers.write(f"{NO_GPU}\n")
            return 1
        name, seconds = line.rstrip("\n").split("\t")
        say = Results(out, name)
        called = "".join(c if c.isalnum() else "_" for c in name)
        function = getattr(rows, called, None) or getattr(whole_models, called)
        try:
            function(rows.Budget(float(seconds)), say)
        except Exception:  # noqa: BLE001 -- a row that fails loses itself alone
            # Whatever it was, it may have left the device unusable: the next row gets a new process.
            traceback.print_exc()
            answers.write(f"failed: {traceback.format_exc().strip().splitlines()[-1][:300]}\n")
            return 1
        answers.write("done\n")
    return 0


class Results:
    """Appends records of one row to the results file, each whole or not at all."""

    def __init__(self, out: Path, row: str) -> None:
        self.out, self._out, self._row = out, out, row

    def __call__(self, **record: Any) -> None:
        """Append one record."""
        line = json.dumps({"row": self._row, **record}, default=str) + "\n"
        with self._out.open("a", encoding="utf-8") as file:
            file.write(line)


class Worker:
    """The process that measures; started when a row needs it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "THP_MEM_ALLOC_ENABLE": "1"}  # as in `zeroshard train`
        if args.rehearse:
            environment["QUARTER_REHEARSES"] = "1"
        if name == "bits":  # torch's deterministic algorithms ask for it before CUDA starts
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        with args.out.with_suffix(".log").open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--worker", "--out", str(args.out)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def run(self, row: Row, seconds: float, limit_s: float) -> str:
        """``done``, or why not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{row.name}\t{seconds}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return f"failed: the worker ended with status {self._process.wait()} before the row began"
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        if not ready:
            return f"failed: it ran for longer than {limit_s:.0f} s"
        answer = self._process.stdout.readline().strip()
        return answer or f"failed: the worker ended with status {self._process.wait()}"

    def end(self) -> None:
        """Kill it, and what it has started: its session is its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


# ------------------------------------------------------------------------------------------------------- supervisor


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a results file; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def is_done(records: list[dict[str, Any]], name: str) -> bool:
    """Whether the last word on a row is that it is done."""
    ends = [record["end"] for record in records if record["row"] == name and "end" in record]
    return bool(ends) and ends[-1] == "done"


def wanted_rows(args: argparse.Namespace) -> list[Row]:
    """The rows that were asked for, in their order."""
    rows = [*ROWS, *ALONE, *(PLANTED if args.rehearse else ())]
    unknown = [name for name in args.only if name not in {row.name for row in rows}]
    if unknown:
        print(
            f"error: --only: there is no row {unknown[0]!r}; rows: {', '.join(r.name for r in rows)}", file=sys.stderr
        )
        sys.exit(2)
    if args.rehearse and not args.only:  # planted rows come between the others, so that each has a row after it
        for index, row in enumerate(PLANTED):
            rows.remove(row)
            rows.insert(3 * index + 1, row)
    if not args.only:
        return [row for row in rows if args.rehearse or row not in ALONE]
    return [row for row in rows if row.name in args.only]


def supervise(args: argparse.Namespace) -> int:
    """Run what is wanted, not done, and short enough for the seconds that are left."""
    began = time.monotonic()
    earlier = [record for path in (args.out, *args.done) for record in read(path)]
    team = Team(args)
    num_open = 0
    try:
        for row in wanted_rows(args):
            left = args.seconds - (time.monotonic() - began)
            if is_done(earlier, row.name) and not args.again:
                print(f"{row.name:24} is done", flush=True)
                continue
            if left < row.seconds:
                print(f"{row.name:24} left for later: it needs {row.seconds:.0f} s of {max(left, 0):.0f}", flush=True)
                num_open += 1
                continue
            say = Results(args.out, row.name)
            say(begin=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
            row_began = time.monotonic()
            outcome = team.run(row, row.seconds, min(row.limit_s, left))
            if outcome == NO_GPU:
                print("error: no GPU: torch sees none here; add --rehearse for toy sizes", file=sys.stderr)
                return 2
            wall_s = time.monotonic() - row_began
            say(end=outcome, wall_s=round(wall_s, 2))
            print(f"{row.name:24} {outcome} in {wall_s:.1f} s", flush=True)
            num_open += outcome != "done" and row not in PLANTED
    finally:
        team.end()
    print(f"{'all':24} {time.monotonic() - began:.1f} s, {num_open} rows open; {args.out}", flush=True)
    if num_open:
        print(f"the log: {args.out.with_suffix('.log')}", file=sys.stderr)
    return int(num_open > 0)


class Team:
    """The worker of the row that runs: rows of one worker's name get the same process for as long as it lives."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._worker: Worker | None = None

    def run(self, row: Row, seconds: float, limit_s: float) -> str:
        """Run ``row``; ``done``, or why not."""
        if self._worker is not None and self._worker.name != row.worker:
            self.end()
        self._worker = self._worker or Worker(row.worker, self._args)
        outcome = self._worker.run(row, seconds, limit_s)
        if outcome != "done":
            self.end()
        return outcome

    def end(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.end()
        self._worker = None


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480, help="start no row that would end later (480)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/results.jsonl"), help="where results are appended")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="other results files, whose rows are done")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows alone")
    parser.add_argument("--again", action="store_true", help="also rows that are done")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, on any machine; adds rows that fail")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{row.name:24} {row.seconds:4.0f} s  {row.about}" for row in (*ROWS, *ALONE)))
        return 0
    if args.out.is_dir():
        print(f"error: --out: {args.out} is a folder; give a file, as {args.out}/results.jsonl", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.worker:
        return work(args.out)
    try:
        return supervise(args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
