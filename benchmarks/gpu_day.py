"""Everything that only a GPU can say, in pieces of under nine minutes; what is done is not done again.

    python benchmarks/gpu_day.py                                  # all pieces, into runs/gpu-day
    python benchmarks/gpu_day.py --pieces kernels-rms_norm memory-8 --again
    python benchmarks/gpu_day.py --minutes 25                     # starts nothing that would end later
    python benchmarks/gpu_day.py --page docs/gpu.md               # the page, from what is there; measures nothing

Each piece is a process of its own. It leaves ``PIECE.json`` once it has ended, with the environment that it ran in, so
a day that was interrupted goes on where it was. A piece that fails or runs for longer than its limit leaves its last
lines in ``PIECE.failed`` and the others go on; exit status 1 then. A piece that cannot run here (one GPU where it asks
for two, a package that is missing) says so and counts as nothing. Without a GPU models are toys and shapes tiny: the
programs run to their end, and the figures claim nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when kernels are imported

from gpu_pieces import PIECES, Piece, SkippedError

LIMIT_S = 540.0  # of a piece: machines that are lent end a command after ten minutes
KEPT_LINES = 40


def environment() -> dict[str, Any]:
    """What a piece ran on."""
    from zeroshard.lab.bench.report import environment

    found = environment()
    if torch.cuda.is_available():
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        found["nvidia_smi"] = done.stdout.strip().splitlines() if done.returncode == 0 else []
        found["num_gpus"] = torch.cuda.device_count()
    return found


def run_piece(name: str, out: Path) -> int:
    """Measure in this process; the JSON is there afterwards, whole."""
    began = time.perf_counter()
    try:
        found = PIECES[name].run(out)
    except SkippedError as reason:
        found = {"skipped": str(reason)}
    except ModuleNotFoundError as error:
        found = {"skipped": f"{error.name} is not installed"}
    content = {"piece": name, "environment": environment(), "wall_s": time.perf_counter() - began, **found}
    partial = out / f"{name}.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / f"{name}.json")
    return 0


def start(name: str, out: Path) -> str:
    """One piece in a process of its own, which ends with its limit; how that went, in a few words."""
    failed = out / f"{name}.failed"
    failed.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--piece", name, "--out", str(out)]
    began = time.monotonic()
    with (out / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    seconds = time.monotonic() - began
    if status == 0:
        skipped = json.loads((out / f"{name}.json").read_text(encoding="utf-8")).get("skipped")
        return f"not run: {skipped}" if skipped else f"done in {seconds:.0f} s"
    lines = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-KEPT_LINES:]
    reason = f"ran for longer than {LIMIT_S:.0f} s" if status is None else f"ended with status {status}"
    failed.write_text("\n".join([reason, *lines]) + "\n", encoding="utf-8")
    return f"{reason}: {failed}"


def _end(process: subprocess.Popen) -> None:
    """The piece and what it started: their session is theirs alone."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


def wanted_pieces(names: list[str]) -> dict[str, Piece]:
    """Those of ``names``, each a name or its beginning with a * after it; none: all."""
    unknown = [name for name in names if not any(_matches(piece, name) for piece in PIECES)]
    if unknown:
        print(f"error: pieces: there is no {unknown[0]!r}; choose of {', '.join(PIECES)}", file=sys.stderr)
        sys.exit(2)
    return {name: piece for name, piece in PIECES.items() if not names or any(_matches(name, each) for each in names)}


def _matches(piece: str, name: str) -> bool:
    return piece == name or (name.endswith("*") and piece.startswith(name[:-1]))


def main() -> int:
    """All pieces that are wanted, not done, and short enough for what time is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-day"), help="where results are kept")
    parser.add_argument("--pieces", nargs="+", default=[], metavar="NAME", help="these alone; kernels-* is all of them")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing that may end later")
    parser.add_argument("--list", action="store_true", help="say what there is and how it went")
    parser.add_argument("--page", type=Path, help="write this page from the results")
    parser.add_argument("--piece", choices=tuple(PIECES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.piece:
        return run_piece(args.piece, args.out)
    chosen = wanted_pieces(args.pieces)
    if args.page:
        from gpu_page import write_page

        write_page(args.out, args.page)
        return 0
    if args.list:
        for name, piece in chosen.items():
            state = next((word for word in ("json", "failed") if (args.out / f"{name}.{word}").exists()), "-")
            print(f"{name:28} {state.replace('json', 'done'):8} {piece.about}")
        return 0
    return _run_all(chosen, args)


def _run_all(chosen: dict[str, Piece], args: argparse.Namespace) -> int:
    began = time.monotonic()
    num_failed = 0
    for name, piece in chosen.items():
        if (args.out / f"{name}.json").exists() and not args.again:
            print(f"{name:28} is done: {args.out / name}.json", flush=True)
            continue
        if time.monotonic() - began + 60 * piece.minutes > 60 * args.minutes:
            print(f"{name:28} left for later: it may take {piece.minutes:g} minutes", flush=True)
            continue
        told = start(name, args.out)
        num_failed += (args.out / f"{name}.failed").exists()
        print(f"{name:28} {told}", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
