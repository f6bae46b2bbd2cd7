"""Prepare a large parquet set, kill it again and again, and see that its shards are those of an undisturbed run.

    python benchmarks/claims/prepare.py --bytes 1e9 --kills 20 --tokenizer bpe:8192

makes the set (python sources, cut and mixed by a seed), prepares it once undisturbed and once killed with SIGKILL at
random moments, and prints tokens per second, the peak memory of all processes together (PSS, sampled), and whether
every file is equal. ``--halves`` also prepares the first half of the set, to see that memory does not grow with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet

ROWS = 1000  # of a row group, as the hub's own files have it


def make_set(folder: Path, num_bytes: int, num_files: int, seed: int = 0) -> None:
    """``num_files`` files of about ``num_bytes`` together, uncompressed, as they lie."""
    folder.mkdir(parents=True)
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="ignore").replace("\0", "") for path in sources)
    draw = random.Random(seed)
    schema = pyarrow.schema({"id": "int64", "text": "string"})
    for number in range(num_files):
        written, row = 0, 0
        with pyarrow.parquet.ParquetWriter(
            folder / f"{number:03d}.parquet", schema, compression="none", use_dictionary=False
        ) as file:
            while written < num_bytes / num_files:
                rows = []
                for _ in range(ROWS):
                    length, at = int(draw.lognormvariate(7.5, 1.0)), draw.randrange(len(text))
                    rows.append(text[at : at + length])
                written += sum(map(len, rows))
                ids = list(range(row, row + ROWS))
                row += ROWS
                file.write_table(pyarrow.table({"id": ids, "text": rows}, schema=schema), row_group_size=ROWS)


class Memory:
    """The peak of proportional set sizes of a process and its children together, in bytes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(process.pid,))
        self._thread.start()

    def _watch(self, pid: int) -> None:
        while not self._done.wait(0.25):
            try:
                parent = psutil.Process(pid)
                family = [parent, *parent.children(recursive=True)]
                self.peak = max(self.peak, sum(each.memory_full_info().pss for each in family))
            except psutil.Error:
                continue

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self.peak


def start(source: Path, out: Path, tokenizer: str, workers: int) -> subprocess.Popen[bytes]:
    words = ["--data", "text", "--data.path", str(source), "--data.dir", str(out), "--data.tokenizer", tokenizer]
    command = [sys.executable, "-m", "zeroshard", "prepare", *words, "--data.workers", str(workers)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def undisturbed(source: Path, out: Path, tokenizer: str, workers: int) -> dict[str, float]:
    began = time.monotonic()
    process = start(source, out, tokenizer, workers)
    memory = Memory(process)
    status = process.wait()
    wall_s, peak = time.monotonic() - began, memory.stop()
    assert status == 0, f"status {status}"
    splits = json.loads((out / "meta.json").read_text())["splits"]
    num_tokens = sum(split["num_tokens"] for split in splits.values())
    return {"wall_s": wall_s, "num_tokens": num_tokens, "tokens_per_s": num_tokens / wall_s, "peak_bytes": peak}


def killed(source: Path, out: Path, tokenizer: str, kills: int, whole_s: float, seed: int) -> tuple[int, float]:
    """Kills that hit a living process, and the seconds that all attempts took; the number of workers changes too."""
    draw = random.Random(seed)
    hits, began = 0, time.monotonic()
    while True:
        process = start(source, out, tokenizer, draw.choice((1, 2, 3)))
        try:
            # Long enough that the work is done in the end, and at no place in particular.
            status = process.wait(draw.uniform(0.0, 2.5 * whole_s / kills) if hits < kills else None)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            hits += 1
            continue
        assert status == 0, f"status {status}"
        if hits >= kills:
            return hits, time.monotonic() - began
        shutil.rmtree(out)  # done too early: from the start again, until there were kills enough


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokenizer", default="bpe:8192")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/prepare-benchmark"))
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    source = args.folder / "set"
    make_set(source, int(args.bytes), args.files)
    size = sum(path.stat().st_size for path in source.iterdir())
    print(f"set: {size:,} bytes in {args.files} files", flush=True)
    if args.halves:
        half = args.folder / "half"
        half.mkdir()
        for path in sorted(source.iterdir())[: args.files // 2]:
            (half / path.name).hardlink_to(path)
        print("half:", _words(undisturbed(half, args.folder / "of-half", args.tokenizer, args.workers)), flush=True)
    whole = undisturbed(source, args.folder / "undisturbed", args.tokenizer, args.workers)
    print("undisturbed:", _words(whole), flush=True)
    hits, wall_s = killed(source, args.folder / "killed", args.tokenizer, args.kills, whole["wall_s"], args.seed)
    equal = digests(args.folder / "undisturbed") == digests(args.folder / "killed")
    print(f"killed {hits} times: {wall_s:.1f} s, files {'equal' if equal else 'DIFFER'}", flush=True)
    left = [path.name for path in args.folder.iterdir() if path.name.endswith(".partial")]
    print("left behind:", ", ".join(left) or "nothing")
    shutil.rmtree(args.folder)
    return 0 if equal and not left else 1


def _words(facts: dict[str, float]) -> str:
    return (
        f"{facts['num_tokens']:,.0f} tokens in {facts['wall_s']:.1f} s, {facts['tokens_per_s']:,.0f} tokens/s, "
        f"peak {facts['peak_bytes'] / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
