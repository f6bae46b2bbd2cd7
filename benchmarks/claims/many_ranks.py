"""Many CPU ranks on one host by one command: memory of each rank and processor time of all.

    python benchmarks/claims/many_ranks.py
    python benchmarks/claims/many_ranks.py --ranks 16 --comm ring --json many.json

Runs ``zeroshard train --nproc N`` on a small model and looks at each rank a few times a second. PSS is what a process
has to itself and its share of what it shares: ranks are forked from a launcher that has imported torch, so they share
most of that. The sum over all is what the host must have. Needs Linux (``/proc/PID/smaps_rollup``).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 2**20
TRAINING = "--data synthetic --max-steps 4 --warmup-steps 1 --eval-interval 0 --eval-rows 1 --micro-batch-size 1"


def children_of(pid: int) -> list[int]:
    """The processes that ``pid`` has started, by their ids."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def pss_of(pid: int) -> int:
    """Bytes that a process has to itself, and its share of the others; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def measure(num_ranks: int, strategy: str, comm: str, out: Path) -> dict[str, float]:
    """Train with so many ranks; the fullest moment that was seen."""
    command = [sys.executable, "-m", "zeroshard", "train", *TRAINING.split(), "--nproc", str(num_ranks)]
    command += ["--strategy", strategy, "--comm", comm, "--model.n-layer", "2", "--out", str(out)]
    began, largest, total, seen = time.perf_counter(), 0, 0, 0
    with tempfile.TemporaryFile() as log:
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while run.poll() is None:
            time.sleep(0.3 + num_ranks / 50)  # looking costs a millisecond a rank
            held = [pss_of(pid) for pid in children_of(run.pid)]
            seen = max(seen, len(held))
            largest, total = max([largest, *held]), max(total, sum(held) + pss_of(run.pid))
        if run.returncode:
            log.seek(0)
            raise SystemExit(f"the run ended with status {run.returncode}:\n{log.read().decode()[-2000:]}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "ranks": num_ranks,
        "ranks_seen": seen,
        "largest_pss_bytes": largest,
        "total_pss_bytes": total,
        "processor_s": used.ru_utime + used.ru_stime,
        "wall_s": time.perf_counter() - began,
    }


def main() -> None:
    """Measure, print a line, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description="Memory and processor time of many CPU ranks on one host.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--comm", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.ranks, args.strategy, args.comm, Path(folder, "run"))
    largest, total = found["largest_pss_bytes"] / MIB, found["total_pss_bytes"] / MIB
    print(
        f"{args.ranks} ranks, {args.strategy} over {args.comm}: largest PSS {largest:.0f} MiB, all with the launcher "
        f"{total:.0f} MiB, {found['processor_s']:.1f} s of the processor, {found['wall_s']:.1f} s"
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
