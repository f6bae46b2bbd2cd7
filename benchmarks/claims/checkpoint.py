"""Saving and loading training state, beside `torch.distributed.checkpoint` (DCP), in one run.

    python benchmarks/claims/checkpoint.py
    python benchmarks/claims/checkpoint.py --n-layer 2 --n-embd 64 --vocab-size 256 --rounds 2 --json c.json

GPT-2 of about 100 M parameters with AdamW, fp32, on two gloo ranks; ours holds it at stage 3, DCP's side with FSDP2.
Contestants take turns, a round each, in the same processes and on the same disk; figures are medians over rounds of
the slower rank, the first round left out.

- stall: for which training stood still, with a forward and backward pass and an update right after the call;
- pass, beside a save: that forward and backward pass alone, and while the save's writer runs beside it;
- total: until the checkpoint is complete on disk, of a second save with no training beside it (ours is flushed by
  then, DCP's default is too);
- load: from the call until the state is in place. Ours verifies every byte first, DCP cannot; "unverified" leaves
  that out;
- bytes: of the folder;
- extra: peak of the rank's anonymous and shared memory above what it held before, in load, and in save above the peak
  of the same pass without a save. Pages of mapped files are not counted: the kernel takes them back at will.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for both sides, as `zeroshard train` has them

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from zeroshard import checkpoint
from zeroshard.comm import TorchCommunicator
from zeroshard.launch.process_group import shutdown
from zeroshard.models import LanguageModel, build_model
from zeroshard.parallel import Setup, Strategy, build_strategy

WORLD_SIZE = 2
SEQ_LEN = 64
CONTESTANTS = ("ours", "ours-async", "dcp", "dcp-async")


def held_bytes() -> int:
    """Anonymous and shared memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


@dataclass
class Peak:
    """The most that the process held while it was watched, above what it held before."""

    num_bytes: int = 0


@contextmanager
def watched() -> Generator[Peak]:
    gc.collect()
    peak, before, done = Peak(), held_bytes(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak.num_bytes = max(peak.num_bytes, held_bytes() - before)
            done.wait(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def make(name: str, args: argparse.Namespace) -> Strategy:
    """A strategy that has taken a step, so that its optimizer has state."""
    overrides = {"n_layer": args.n_layer, "n_embd": args.n_embd, "n_head": args.n_embd // 64}
    model = build_model("gpt2-124m", vocab_size=args.vocab_size, seq_len=SEQ_LEN, overrides=overrides)
    setup = Setup(
        model=model,
        units=model.units,
        comm=TorchCommunicator(),
        optimizer_cls=torch.optim.AdamW,
        param_groups=lambda module: [{"params": list(module.parameters())}],
        optimizer_kwargs={"lr": 1e-3},
    )
    strategy = build_strategy(name, setup)
    forward_backward(strategy, args)
    update(strategy)
    return strategy


def forward_backward(strategy: Strategy, args: argparse.Namespace) -> None:
    """As one step of training."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, args.vocab_size, (args.batch, SEQ_LEN + 1), generator=generator)
    strategy.model(tokens[:, :-1], tokens[:, 1:]).backward()


def update(strategy: Strategy) -> None:
    """The rest of that step."""
    strategy.optimizer.step()
    strategy.optimizer.zero_grad()


def states(strategy: Strategy) -> dict[str, Any]:
    model, optimizer = get_state_dict(strategy.model, strategy.optimizer)
    return {"model": model, "optimizer": optimizer}


def save_ours(strategy: Strategy, folder: Path, number: int, saver: checkpoint.BackgroundSaver) -> Callable[[], None]:
    saver.start(folder / f"step-{number}", strategy, step=number)

    def wait() -> None:
        saved = saver.wait()
        assert saved is not None
        assert not saved.error, saved.error

    return wait


def save_dcp(
    strategy: Strategy, folder: Path, number: int, in_background: bool, group: dist.ProcessGroup
) -> Callable[[], None]:
    path = str(folder / f"step-{number}")
    if in_background:
        # A group of its own, since its thread speaks while training does.
        future = dcp.async_save(states(strategy), checkpoint_id=path, process_group=group)
        return lambda: future.result() and None  # ty: ignore[missing-union-attribute]
    dcp.save(states(strategy), checkpoint_id=path)
    return lambda: None


def load_dcp(strategy: Strategy, path: Path) -> None:
    state = states(strategy)
    dcp.load(state, checkpoint_id=str(path))
    set_state_dict(
        strategy.model, strategy.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def take_turn(
    contestant: str, strategy: Strategy, folder: Path, group: dist.ProcessGroup, args: argparse.Namespace
) -> dict[str, float]:
    """One contestant's saves and loads; this rank's figures."""
    dist.barrier()  # the other rank is done with what is there
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    in_background, ours = contestant.endswith("async"), contestant.startswith("ours")
    saver = checkpoint.BackgroundSaver(strategy.comm, background=in_background, in_place=True)

    def save(number: int) -> Callable[[], None]:
        if ours:
            return save_ours(strategy, folder, number, saver)
        return save_dcp(strategy, folder, number, in_background, group)

    found: dict[str, float] = {}
    with watched() as plain:
        found["pass_s"], _ = timed(lambda: forward_backward(strategy, args))
    update(strategy)
    with watched() as peak:
        found["stall_s"], wait = timed(lambda: save(1))
        found["beside_s"], _ = timed(lambda: forward_backward(strategy, args))
        began = time.perf_counter()
        saver.settle()  # nothing where the save is DCP's
        found["stall_s"] += time.perf_counter() - began
        update(strategy)
        wait()
    found["save_extra_bytes"] = max(0, peak.num_bytes - plain.num_bytes)
    found["total_s"], _ = timed(lambda: save(2)())
    saver.close()
    with watched() as peak:
        if ours:
            found["load_s"], _ = timed(lambda: checkpoint.load(folder / "step-1", strategy))
        else:
            found["load_s"], _ = timed(lambda: load_dcp(strategy, folder / "step-1"))
    found["load_extra_bytes"] = peak.num_bytes
    if ours:
        found["load_unverified_s"], _ = timed(lambda: checkpoint.load(folder / "step-1", strategy, verified=True))
    found["num_bytes"] = sum(file.stat().st_size for file in (folder / "step-1").iterdir())
    return found


def rank_main(rank: int, args: argparse.Namespace, store: str, results: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    group = dist.new_group()
    ours, theirs = make("zero3", args), make("fsdp2", args)
    folder = Path(args.folder) / "benchmark"
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds + 1):
        order = CONTESTANTS if number % 2 else CONTESTANTS[::-1]
        figures = {
            name: take_turn(name, ours if name.startswith("ours") else theirs, folder, group, args) for name in order
        }
        by_rank: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(by_rank, figures)
        if number:  # the first one warms up
            worst = {
                name: {key: max(each[name][key] for each in by_rank) for key in by_rank[0][name]} for name in order
            }
            rounds.append(worst)
    if rank == 0:
        shutil.rmtree(folder)
        medians = {
            name: {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}
            for name in CONTESTANTS
        }
        unit = 4 * max(
            sum(param.numel() for param in block.parameters()) for block in cast(LanguageModel, theirs.model).blocks
        )
        num_params = sum(param.numel() for param in theirs.model.parameters())
        Path(results).write_text(json.dumps({"num_params": num_params, "unit_bytes": unit, "figures": medians}))
    del ours, theirs
    shutdown()


def table(result: dict[str, Any]) -> str:
    """The figures as text; a dash where there is none."""
    columns = {
        "stall_s": ("stall s", 1),
        "pass_s": ("pass s", 1),
        "beside_s": ("beside a save s", 1),
        "total_s": ("total s", 1),
        "load_s": ("load s", 1),
        "load_unverified_s": ("unverified s", 1),
        "num_bytes": ("MiB", 2**20),
        "save_extra_bytes": ("save extra MiB", 2**20),
        "load_extra_bytes": ("load extra MiB", 2**20),
    }
    lines = [f"{'':12}" + "".join(f"{title:>16}" for title, _ in columns.values())]
    for name, figures in result["figures"].items():
        cells = (f"{figures[key] / scale:.3f}" if key in figures else "-" for key, (_, scale) in columns.items())
        lines.append(f"{name:12}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-layer", type=int, default=10)
    parser.add_argument("--n-embd", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=38400)
    parser.add_argument("--batch", type=int, default=8, help=f"sequences of {SEQ_LEN} tokens in a rank's pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="", help="where to write; empty: a temporary folder")
    parser.add_argument("--json", default="", help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zeroshard-checkpoint-") as scratch:
        args.folder = args.folder or scratch
        results = Path(scratch) / "results.json"
        mp.spawn(rank_main, args=(args, f"{scratch}/store", str(results)), nprocs=WORLD_SIZE)
        result = json.loads(results.read_text())
    millions, unit = result["num_params"] / 1e6, result["unit_bytes"] / 2**20
    print(f"{millions:.1f} M parameters with AdamW, {WORLD_SIZE} ranks, a unit has {unit:.1f} MiB of weights")
    print(table(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
