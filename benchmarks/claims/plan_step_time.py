"""Is the time of a step what the planner says after `zeroshard bench device`? Worlds x models x stages.

    python benchmarks/claims/plan_step_time.py --json step_time.json           # measures, then predicts
    python benchmarks/claims/plan_step_time.py --again step_time.json          # predicts anew from what was measured

For each world the machine is calibrated with as many ranks at once, and every stage takes steps over gloo. A round has
all of both in a shuffled order, for a machine that others use may be a tenth faster in one minute than in the next. The
prediction knows the calibration, shapes and the stage table; no step that is predicted was used to calibrate. It passes
where every prediction is within 15 %, and where stages whose times differ by more than that come out in the right
order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeroshard import process

process.prepare_torch()

import torch  # noqa: E402

from zeroshard.comm import Communicator  # noqa: E402
from zeroshard.lab.bench import device, step  # noqa: E402
from zeroshard.lab.bench.ranks import close, communicator, on_ranks  # noqa: E402
from zeroshard.lab.bench.report import environment, spread_of  # noqa: E402
from zeroshard.lab.predict.hardware import read_calibration, write_calibration  # noqa: E402
from zeroshard.zero import STAGES  # noqa: E402

TOLERANCE = 0.15


def measure(
    found: dict[str, Any], worlds: list[int], shapes: list[str], rounds: int, steps: int, path: Path | None
) -> None:
    """Adds calibrations and steps to ``found``, which is written whenever there is more in it."""
    comm = found["comm"]
    for world in worlds:
        seen = on_ranks(_round_by_round, world, comm, shapes, rounds, steps)
        report, calibration = device.told(seen, world, [comm], "cpu", 1)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "device.json")
            write_calibration(file, calibration)
            found["calibrations"][str(world)] = {"file": json.loads(file.read_text()), "rows": report.rows}
        for contestant, times in seen["others"].items():
            name, stage = contestant.split()
            found["steps"].append({"world": world, "shape": name, "stage": int(stage), "wall_s": spread_of(times)})
        print(f"measured {world} ranks", flush=True)
        if path is not None:
            path.write_text(json.dumps(found, indent=1))


def _round_by_round(
    rank: int, cpu: torch.device, comm: str, shapes: list[str], rounds: int, num_steps: int
) -> dict[str, Any]:
    """What `device.measure` finds, steps of every shape and stage among it."""
    made = communicator(comm)
    steps = {
        f"{name} {stage}": _steps(step.SHAPES[name], stage, made, rank, cpu, num_steps)
        for name in shapes
        for stage in STAGES
    }
    found = device.measure(rank, cpu, [comm], rounds, steps)
    steps.clear()
    close(made)
    return found


def _steps(
    shape: step.Shape, stage: int, comm: Communicator, rank: int, cpu: torch.device, num_steps: int
) -> Callable[[], float]:
    """Median seconds of a few steps, after an untimed one."""
    contestant = step.build(f"zero{stage}@", shape, {"": comm}, cpu)
    tokens, targets = step.batch(shape, rank, cpu)

    def seconds() -> float:
        times = [step.take(contestant, tokens, targets)[0] for _ in range(num_steps + 1)]
        return statistics.median(times[1:])

    seconds()
    return seconds


def predict(found: dict[str, Any]) -> list[dict[str, Any]]:
    from zeroshard.lab.planner.run_plan import predicted_step

    rows = []
    for world, given in found["calibrations"].items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "device.json")
            path.write_text(json.dumps(given["file"]))
            calibration = read_calibration(path)
        for row in (row for row in found["steps"] if row["world"] == int(world)):
            shape = step.SHAPES[row["shape"]]
            timing = predicted_step(
                step.make_model(shape, "meta"),
                STAGES[row["stage"]],
                int(world),
                shape.batch,
                shape.seq_len,
                calibration,
            )
            measured = row["wall_s"]["median"]
            rows.append(
                {
                    **row,
                    "predicted_s": timing.step_s,
                    "compute_s": timing.compute_s,
                    "comm_s": timing.comm_s,
                    "exposed_s": timing.exposed_s,
                    "error": timing.step_s / measured - 1,
                }
            )
    return rows


def misordered(rows: list[dict[str, Any]]) -> list[str]:
    """Pairs of stages that differ by more than the tolerance, and come out the other way round."""
    wrong = []
    for world, shape in dict.fromkeys((row["world"], row["shape"]) for row in rows):
        alike = [row for row in rows if (row["world"], row["shape"]) == (world, shape)]
        for one, other in itertools.combinations(alike, 2):
            slow, fast = sorted((one, other), key=lambda row: -row["wall_s"]["median"])
            apart = slow["wall_s"]["median"] / fast["wall_s"]["median"] - 1
            if apart > TOLERANCE and slow["predicted_s"] <= fast["predicted_s"]:
                wrong.append(
                    f"{shape} on {world} ranks: stage {slow['stage']} is slower than {fast['stage']} by {apart:.0%}"
                )
    return wrong


def show(rows: list[dict[str, Any]]) -> bool:
    print(f"{'ranks':>5} {'model':6} {'stage':>5} {'measured ms':>12} {'quartiles':>17} {'predicted':>10} "
          f"{'compute':>8} {'comm':>8} {'exposed':>8} {'error':>7}")  # fmt: skip
    for row in rows:
        wall = row["wall_s"]
        print(
            f"{row['world']:5} {row['shape']:6} {row['stage']:5} {wall['median'] * 1e3:12.1f} "
            f"{wall['low'] * 1e3:8.1f}-{wall['high'] * 1e3:<8.1f} {row['predicted_s'] * 1e3:10.1f} "
            f"{row['compute_s'] * 1e3:8.1f} {row['comm_s'] * 1e3:8.1f} {row['exposed_s'] * 1e3:8.1f} "
            f"{row['error']:+7.1%}"
        )
    wrong = misordered(rows)
    within = sum(abs(row["error"]) <= TOLERANCE for row in rows)
    worst = max(rows, key=lambda row: abs(row["error"]))
    print(f"{within} of {len(rows)} within {TOLERANCE:.0%}; the worst is {worst['error']:+.1%}")
    print("\n".join(wrong) or "every pair of stages that differs by more comes out in its order")
    return within == len(rows) and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="ranks, as processes of this machine")
    parser.add_argument("--shapes", nargs="+", choices=step.SHAPES, default=["small", "deep", "wide"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each stage in a round, after one untimed")
    parser.add_argument("--comm", choices=["torch", "ring", "shm"], default="torch")
    parser.add_argument("--json", type=Path, help="write all that was measured here")
    parser.add_argument("--again", type=Path, help="measure nothing: predict from such a file")
    parser.add_argument("--only-measure", action="store_true", help="predict nothing")
    args = parser.parse_args()
    if args.again:
        found = json.loads(args.again.read_text())
    else:
        shapes = {name: asdict(step.SHAPES[name]) for name in args.shapes}
        found = {"environment": environment(), "shapes": shapes, "comm": args.comm, "calibrations": {}, "steps": []}
        measure(found, args.worlds, args.shapes, args.rounds, args.steps, args.json)
    return 0 if args.only_measure or show(predict(found)) else 3


if __name__ == "__main__":
    sys.exit(main())
