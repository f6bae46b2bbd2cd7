"""Seconds that `zeroshard report` takes for a sweep of 1,000 finished cases; status 1 where it is more than --limit.

The folder is made here: strategies x bandwidths x depths, each run with its configuration, a log, a summary. The
process that reports is started anew, as the command line does, so imports count.

    python benchmarks/claims/report.py [--cases 1000] [--steps 30] [--limit 10]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from run_folders import FACTORS, write_sweep

NUM_BANDWIDTHS = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds")
    asked = parser.parse_args()
    depths = -(-asked.cases // (len(FACTORS) * NUM_BANDWIDTHS))
    with tempfile.TemporaryDirectory() as root:
        rates = [f"{100 * 1.7**power:.0f}Mbit/s" for power in range(NUM_BANDWIDTHS)]
        sweep = write_sweep(Path(root) / "sweep", rates, range(1, depths + 1), num_steps=asked.steps)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "zeroshard", "report", str(sweep)], check=True)
        seconds = time.perf_counter() - began
        page = (sweep / "report.html").stat().st_size
    num_cases = depths * len(FACTORS) * NUM_BANDWIDTHS
    print(f"{num_cases:,} cases of {asked.steps} steps: {seconds:.2f} s, a page of {page / 1e6:.1f} MB")
    return int(seconds > asked.limit)


if __name__ == "__main__":
    sys.exit(main())
