"""What benchmarks/kernels.py measured, against what was wanted of an H100 or H200.

    python benchmarks/kernel_targets.py kernels.json

One line a target: the worst case among the rows that it speaks of. Exit status 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NORMS = ("layer_norm", "rms_norm")


def ours(rows: Iterable[Row], operations: tuple[str, ...], mode: str, contains: str = "") -> list[Row]:
    return [
        row
        for row in rows
        if row["operation"] in operations
        and row["mode"] == mode
        and row["contestant"] == "triton"
        and contains in row["shape"]
    ]


def rival(rows: Iterable[Row], row: Row, contestant: str) -> Row | None:
    same = ("operation", "shape", "dtype", "mode")
    found = [r for r in rows if r["contestant"] == contestant and all(r[key] == row[key] for key in same)]
    return found[0] if found else None


def against(contestant: str, quantity: str = "seconds") -> Callable[[list[Row], Row], float | None]:
    """How often our quantity goes into theirs: above 1 is better."""

    def ratio(rows: list[Row], row: Row) -> float | None:
        other = rival(rows, row, contestant)
        return None if other is None or not row[quantity] else other[quantity] / row[quantity]

    return ratio


def of_copy(rows: list[Row], row: Row) -> float:
    return row["of_copy"]


TARGETS = [
    ("norm, forward, share of a copy", NORMS, "forward", "", of_copy, 0.92),
    ("norm, backward with weight gradients, share of a copy", NORMS, "backward", "", of_copy, 0.85),
    ("norm, both, times eager", NORMS, "both", "", against("eager"), 1.5),
    ("norm, both, times torch.compile", NORMS, "both", "", against("compile"), 1.0),
    ("norm, both, times Liger-Kernel", NORMS, "both", "", against("liger"), 1.1),
    ("residual and norm, both, times eager", NORMS, "both", "residual", against("eager"), 1.8),
    ("cross-entropy in place, share of a copy", ("cross_entropy",), "both", "", of_copy, 0.88),
    ("linear cross-entropy, times eager", ("linear_cross_entropy",), "both", "50304", against("eager"), 1 / 1.05),
    ("linear cross-entropy, eager's peak over ours", ("linear_cross_entropy",), "both", "50304",
     against("eager", "peak_bytes"), 1 / 0.15),
    ("AdamW with clipping, share of a copy", ("adamw",), "forward", "", of_copy, 0.90),
    ("AdamW with clipping, times torch's fused", ("adamw",), "forward", "", against("fused"), 1.15),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="what benchmarks/kernels.py --json wrote")
    measured = json.loads(parser.parse_args().measured.read_text())
    rows, missed = measured["rows"], 0
    print(measured["environment"])
    if measured["environment"]["cuda"] is None:
        print("measured without a GPU: no target applies")
        return 0
    for name, operations, mode, contains, quantity, wanted in TARGETS:
        seen = [(quantity(rows, row), row) for row in ours(rows, operations, mode, contains)]
        seen = [(value, row) for value, row in seen if value is not None]
        if not seen:
            print(f"open    {name}: not measured")
            continue
        value, row = min(seen, key=lambda pair: pair[0])
        met = value >= wanted
        missed += not met
        verdict = "met   " if met else "missed"
        print(f"{verdict}  {name}: {value:.3f} of {wanted:.3f} wanted, at {row['shape']} {row['dtype']}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
