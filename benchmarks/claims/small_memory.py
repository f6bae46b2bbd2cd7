"""A model whose training states are four times the memory that its ranks may have: it trains with --offload disk-all.

    python benchmarks/claims/small_memory.py --folder FOLDER [--resume]

The bound is ``RLIMIT_DATA`` (``ulimit -d``): the kernel refuses private memory of a process beyond it, without root and
without a control group. Torch's code and Python's own objects need memory that no model decides. So a first run, of the
same depth and a small width, says what a rank takes without a model; it is allowed that, and in addition a quarter of
the bytes of its fp32 master weights and AdamW's two states (12 bytes a parameter). Then the run is tried three times:
as it is, with states in the file, and with gradients and weights there too.

Resident memory is that of the process without what it takes without a model, read from ``/proc`` every few
milliseconds: pages of its own, and its part of the pages that ranks share, where a page that k ranks have mapped counts
1/k in each (``Pss_Shmem``). The plan counts the buffers that shared-memory collectives read in place in its peak, and
the communicator's slots beside it. Bytes of the disk are the kernel's count for each process. All of it, and seconds of
a step, stand beside the run's plan. malloc gives freed blocks back at once (``MALLOC_MMAP_THRESHOLD_``), so that what
is resident is what is alive. That, and being looked at, make a step twice as long; so seconds of a step are those of a
run of its own, which nobody looks at, with malloc as ever and without the bound, which only refuses. The machine, for
whose rates the runs are planned, is measured first, unless ``--device`` gives it.

With ``--resume`` each run that trains is started once more, gets SIGTERM after half of its steps, upon which it saves a
checkpoint, and is resumed from that, all under the same bound: the losses must be those of the run without a break.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from zeroshard.host.columns import columns
from zeroshard.models import LlamaConfig

MIB = 2**20
STATE_BYTES = 12  # of a parameter: an fp32 master weight, and two fp32 states
EVERY_S = 0.01
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "THP_MEM_ALLOC_ENABLE": "0"}
TINY = 64  # width of the model whose ranks say what a rank takes without one


@dataclass
class Process:
    """What a process was seen to have, in bytes, and how much it had read from and written to disks by when."""

    times: list[float] = field(default_factory=list)  # seconds since 1970
    data: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)  # its part of what ranks share: collectives read there
    resident: list[int] = field(default_factory=list)  # both
    read: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def most(self, what: str, end: float) -> int:
        """The most of it until ``end``."""
        return max(n for at, n in zip(self.times, getattr(self, what), strict=True) if at <= end)

    def moved(self, what: str, begin: float, end: float) -> int:
        """Bytes that were read or written between two times."""
        found = list(zip(self.times, getattr(self, what), strict=True))
        before = [n for at, n in found if at <= begin]
        return max(n for at, n in found if at <= end) - (before[-1] if before else 0)


def watch(process: subprocess.Popen[str], out: Path, stop_after: int = 0, *, looks: bool = True) -> dict[int, Process]:
    """What ``process`` and its descendants have had until it ended, by process id; nothing, if nobody ``looks``.

    ``stop_after``: steps in the run folder ``out`` upon which it is sent SIGTERM; 0: it is not.
    """
    seen: dict[int, Process] = {}
    if not looks:
        process.wait()
    while process.poll() is None:
        for pid in _family(process.pid):
            _look(pid, seen.setdefault(pid, Process()))
        if stop_after and len(_steps(out)) >= stop_after:
            process.send_signal(signal.SIGTERM)
            stop_after = 0
        time.sleep(EVERY_S)
    return seen


def _steps(out: Path) -> list[dict[str, Any]]:
    """The records of the steps of a run so far; a line that is being written is not one yet."""
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in records if record.get("event") == "step"]


def _family(pid: int) -> Iterator[int]:
    yield pid  # a run of one rank has no others
    try:
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return


def _look(pid: int, found: Process) -> None:
    try:
        text = Path(f"/proc/{pid}/status").read_text() + Path(f"/proc/{pid}/smaps_rollup").read_text()
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in _pairs(text) if rest.endswith("kB")}
        moved = {name: int(rest) for name, rest in _pairs(Path(f"/proc/{pid}/io").read_text())}
    except (OSError, ValueError, IndexError):  # it has ended
        return
    found.times.append(time.time())
    found.data.append(sizes.get("VmData", 0))
    found.own.append(sizes.get("RssAnon", 0))
    found.shared.append(sizes.get("Pss_Shmem", 0))
    found.resident.append(found.own[-1] + found.shared[-1])
    found.read.append(moved["read_bytes"])
    found.written.append(moved["write_bytes"])


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        yield name, rest.strip()


@dataclass
class Run:
    """A run that has ended: its exit status, its last line, its ranks, and what its folder says.

    ``ends``: when each step was over; what comes after the last, an evaluation and a checkpoint, is not counted.
    ``losses``: by step.
    """

    status: int
    last: str
    ranks: list[Process]
    summary: dict[str, Any]
    step_s: float
    ends: list[float]
    losses: dict[int, float]

    def most(self, what: str) -> int:
        """The most that any rank had."""
        return max(rank.most(what, self.ends[-1]) for rank in self.ranks)

    def planned(self, what: str) -> Any:
        """What the run's plan says."""
        return self.summary["plan"][what]["predicted"]

    def moved(self, what: str) -> float:
        """Bytes of a rank and step, of those after the first two."""
        begin, end = self.ends[1], self.ends[-1]
        return sum(rank.moved(what, begin, end) for rank in self.ranks) / len(self.ranks) / (len(self.ends) - 2)


def train(
    given: argparse.Namespace,
    out: Path,
    width: int,
    offload: str,
    bound: int | None,
    *,
    stop_after: int = 0,
    resumes: bool = False,
    looks: bool = True,
) -> Run:
    """Train in child processes whose private memory is at most ``bound`` bytes each; None: as much as they want.

    ``stop_after``, ``looks``: as of `watch`; malloc is as ever if nobody looks. ``resumes``: whether it continues the
    run in ``out`` from its checkpoint.
    """
    model = {"n-layer": given.layers, "n-embd": width, "n-head": width // 64, "n-kv-head": width // 64}
    words = [str(Path(sys.executable).with_name("zeroshard")), "train", "--data", "synthetic", "--model", "llama-tiny"]
    words += [f"--model.{name}={value}" for name, value in model.items()]
    words += ["--model.activation-checkpointing", "full", "--seq-len", str(given.seq_len)]
    words += ["--micro-batch-size", "1", "--strategy", "zero3", "--nproc", str(given.nproc), "--comm", "shm"]
    words += ["--dtype", given.dtype, "--reduce-dtype", given.dtype, "--max-steps", str(given.steps)]
    words += ["--eval-interval", "0", "--eval-batches", "1", "--checkpoint-interval", "-1"]
    words += ["--log-interval", "1", "--out", str(out)]
    words += ["--offload", offload, "--offload.fraction", "1"] if offload != "none" else []
    words += ["--offload.path", str(out / "states")] if offload.startswith("disk") else []
    words += ["--plan.device", given.device] if given.device else []
    words += ["--resume", "auto"] if resumes else []

    def limit() -> None:
        if bound is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))

    log = out.with_suffix(".log")
    with log.open("w") as file:
        env = os.environ | (MALLOC if looks else {})
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, text=True, env=env, preexec_fn=limit)
        seen = watch(process, out, stop_after, looks=looks)
    lines = log.read_text().splitlines()
    last = next((line for line in reversed(lines) if "rror" in line or "memory" in line), lines[-1] if lines else "")
    summary, times, ends, steps = {}, [0.0], [0.0], _steps(out)
    if (out / "summary.json").exists():
        summary = json.loads((out / "summary.json").read_text())
        times = [step["step_s"] for step in steps[2:]] or times
        ends = [datetime.fromisoformat(step["time"]).timestamp() for step in steps]
    ranks = sorted(seen.values(), key=lambda each: max(each.resident, default=0))[-given.nproc :]
    losses = {step["step"]: step["loss"] for step in steps}
    return Run(process.returncode, last.strip(), ranks, summary, statistics.median(times), ends, losses)


def main() -> None:
    """Run all of it, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="", help="a file of `zeroshard bench device`; not given: it is measured")
    parser.add_argument("--folder", default="", help="where the ranks' files lie while this runs")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of weights and gradients")
    parser.add_argument("--times", type=float, default=4.0, help="how many times the bound the states are")
    parser.add_argument("--only", nargs="*", default=["none", "disk", "disk-all"])
    parser.add_argument("--resume", action="store_true", help="break each run that trains, and resume it")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="small-memory-", dir=given.folder or None))
    try:
        given.device = given.device or device_of(given, folder)
        print(json.dumps(measured(given, folder), indent=2) if given.json else shown(measured(given, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def device_of(given: argparse.Namespace, folder: Path) -> str:
    """Measure this machine; return the path of the file."""
    out = folder / "device.json"
    words = [str(Path(sys.executable).with_name("zeroshard")), "bench", "device", "--nproc", str(given.nproc)]
    words += ["--comms", "shm", "--disk", str(folder / "disk"), "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return str(out)


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What each run had and did, with the bound of all."""
    tiny = train(given, folder / "tiny", TINY, "disk-all", None)
    assert tiny.status == 0, tiny.last
    # what is small does not fill the communicator's slots
    own, without = (tiny.most(what) - tiny.planned("peak_bytes") for what in ("data", "resident"))
    num_params = _num_params(given)
    states = STATE_BYTES * num_params // given.nproc
    bound = int(states / given.times)
    found: dict[str, Any] = {"num_params": num_params, "state_bytes": states, "bound_bytes": bound, "own_bytes": own}
    for offload in given.only:
        run = train(given, folder / offload, given.width, offload, own + bound)
        found[offload] = {"status": run.status, "last": run.last}
        if run.status == 0:
            plan = run.summary["plan"]
            timed = train(given, folder / f"{offload}-timed", given.width, offload, None, looks=False)
            found[offload] |= {
                "planned_bytes": run.planned("peak_bytes") + run.planned("comm_bytes"),
                "resident_bytes": run.most("resident") - without,
                "shared_bytes": run.most("shared"),
                "data_bytes": run.most("data") - own,
                "planned_step_s": run.planned("step_s"),
                "step_s": timed.step_s,
                **_bytes_of_disk(plan, offload),
                "written_bytes": run.moved("written"),
                "read_bytes": run.moved("read"),
            }
            if given.resume:
                found[offload]["resume"] = resumed(given, folder / f"{offload}-broken", offload, own + bound, run)
    return found


def resumed(given: argparse.Namespace, out: Path, offload: str, bound: int, whole: Run) -> dict[str, Any]:
    """What a run does that is stopped and resumed under the same bound, beside the ``whole`` one."""
    first = train(given, out, given.width, offload, bound, stop_after=given.steps // 2)
    then = train(given, out, given.width, offload, bound, resumes=True)
    assert first.status, "it ended before it was stopped: give more --steps"
    return {
        "statuses": [first.status, then.status],
        "last": then.last,
        "resumed_after": max(first.losses, default=0),
        "has_same_losses": then.losses == whole.losses,
    }


def _bytes_of_disk(plan: dict[str, Any], offload: str) -> dict[str, int]:
    """What a step writes and reads by the plan: all of the file once, and masters again for each of two gathers.

    A forward that waits for the disk finds them in the slots of the update, and reads less.
    """
    sizes = {name: each["predicted"] for name, each in plan["memory_bytes"].items() if name.startswith("disk_")}
    again = 2 * sizes["disk_master"] if offload == "disk-all" else 0
    return {"planned_written_bytes": sum(sizes.values()), "planned_read_bytes": sum(sizes.values()) + again}


def _num_params(given: argparse.Namespace) -> int:
    heads = given.width // 64
    sizes = {"n_layer": given.layers, "n_embd": given.width, "n_head": heads, "n_kv_head": heads}
    with torch.device("meta"):
        model = LlamaConfig(vocab_size=256, seq_len=given.seq_len, **sizes).build()
    return sum(param.numel() for param in model.parameters())


_MOVED = ("planned_written_bytes", "written_bytes", "planned_read_bytes", "read_bytes")


def shown(found: dict[str, Any]) -> str:
    """The table, and a line on the bound."""
    names = [
        "planned",
        "resident",
        "of it",
        "shared",
        "planned s",
        "s a step",
        "planned written",
        "written",
        "planned read",
        "read",
    ]
    rows = [["offload", "ends", *names]]
    for offload, run in ((name, run) for name, run in found.items() if isinstance(run, dict)):
        if run["status"]:
            rows.append([offload, f"status {run['status']}: {run['last'][:60]}"] + [""] * len(names))
            continue
        sizes = [f"{run[name] / MIB:.1f} MiB" for name in ("planned_bytes", "resident_bytes", "shared_bytes")]
        sizes.insert(2, f"{run['resident_bytes'] / run['planned_bytes']:.3f}")
        times = [f"{run[name]:.2f}" if run[name] else "" for name in ("planned_step_s", "step_s")]
        moved = [f"{run[name] / MIB:.1f} MiB" for name in _MOVED]
        rows.append([offload, "trains", *sizes, *times, *moved])
    said = (
        f"{found['num_params']:,} parameters; a rank's states {found['state_bytes'] / MIB:.1f} MiB, its bound "
        f"{found['bound_bytes'] / MIB:.1f} MiB beside "
        f"{found['own_bytes'] / MIB:.1f} MiB that it takes without a model"
    )
    return "\n".join([said, *columns(rows, right=tuple(range(2, 12))), *_resumes(found)])


def _resumes(found: dict[str, Any]) -> Iterator[str]:
    """A line for each run that was resumed."""
    runs = {name: run for name, run in found.items() if isinstance(run, dict)}
    for offload, run in ((name, run["resume"]) for name, run in runs.items() if "resume" in run):
        ends = f"statuses {run['statuses']}: {run['last']}"
        if run["statuses"][1] == 0:
            ends = f"{'the same losses as' if run['has_same_losses'] else 'OTHER losses than'} without the break"
        yield f"{offload}, resumed after step {run['resumed_after']}: {ends}"


if __name__ == "__main__":
    main()
