"""What wire formats save and what they cost: bytes on an interface, seconds of a step, validation loss.

    sudo python benchmarks/study/wire.py links              # two network namespaces, 100 Mbit/s and 1 Gbit/s
    sudo python benchmarks/study/wire.py links --per-node 2 --wires fp32 int8 "int8 by nodes"  # two ranks in each
    python benchmarks/study/wire.py loss                    # 300 steps of a small model, one seed
    python benchmarks/study/wire.py loss --full             # 2,000 steps of a 10 M model, three seeds

``links`` takes turns: in each round every wire makes one step, so that what else the machine does meets all alike.
Bytes are the kernel's counts of the interface, of what a node sent; of one rank in each node, those of the plan stand
beside them. ``cpu`` is the processor's time of a step. ``loss`` trains by `zeroshard train` on a text; each wire has
the same seeds and data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from two_nodes import result_of_ranks, sent_so_far

from zeroshard.comm import RingCommunicator
from zeroshard.host import process
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.traffic import messages
from zeroshard.lab.run_folders import read_run
from zeroshard.models import build_model
from zeroshard.zero import STAGES, MixedPrecision, Zero

WIRES = {
    "fp32": MixedPrecision(),
    "bf16": MixedPrecision(gather=torch.bfloat16, reduce=torch.bfloat16),
    "int8": MixedPrecision(gather="int8", reduce="int8"),
    "int8, int4": MixedPrecision(gather="int8", reduce="int4"),
    "int4": MixedPrecision(gather="int4", reduce="int4"),
}
BY_NODES = "int8 by nodes"
FLAGS = {
    "fp32": [],
    "bf16": ["--wire.weights", "bfloat16", "--wire.grads", "bfloat16"],
    "int8": ["--wire.weights", "int8", "--wire.grads", "int8"],
    "int8, int4": ["--wire.weights", "int8", "--wire.grads", "int4"],
    "int4": ["--wire.weights", "int4", "--wire.grads", "int4"],
}
PORT = 29517  # in namespaces of its own
SIZES = {"n_layer": 5, "n_head": 6, "n_embd": 384}  # 9 M
SEQ_LEN = 64


@dataclass
class Ranked:
    """One engine with its optimizer, and what its steps took."""

    zero: Zero
    optimizer: torch.optim.Optimizer
    seconds: list[float]
    cpu_s: list[float]
    sent_bytes: list[int]


def wire_of(name: str, per_node: int) -> MixedPrecision:
    """What travels, by its name here."""
    return replace(WIRES["int8"], node_size=per_node) if name == BY_NODES else WIRES[name]


def rank_main(address: str, rank: int, stage: int, rounds: int, per_node: int, wires: list[str]) -> None:
    """One node: make every wire's engine, take turns, and on rank 0 print what was measured."""
    process.prepare_torch()
    torch.set_num_threads(1)
    where, limit = f"tcp://{address}:{PORT}", timedelta(seconds=600)
    dist.init_process_group("gloo", where, rank=rank, world_size=2 * per_node, timeout=limit)
    comm = RingCommunicator()
    engines = {}
    for wire in wires:
        torch.manual_seed(0)
        model = build_model("gpt2-demo", vocab_size=256, seq_len=SEQ_LEN, overrides=SIZES)
        zero = Zero(model, stage, list(model.blocks), comm, wire_of(wire, per_node))
        engines[wire] = Ranked(zero, zero.optimizer(torch.optim.AdamW, lr=1e-3, fused=True), [], [], [])
    tokens = torch.randint(256, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(rank))
    for _ in range(rounds + 1):
        for engine in engines.values():
            comm.barrier()
            sent, start, cpu = sent_so_far(), time.perf_counter(), time.process_time()
            engine.zero.model(tokens[:, :-1], tokens[:, 1:]).backward()
            engine.zero.clip_grad_norm_(1.0)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            comm.barrier()
            engine.seconds.append(time.perf_counter() - start)
            engine.cpu_s.append(time.process_time() - cpu)
            engine.sent_bytes.append(sent_so_far() - sent)
    if rank == 0:
        found = {
            wire: {
                "step_s": statistics.median(engine.seconds[1:]),
                "cpu_s": statistics.median(engine.cpu_s[1:]),
                "sent_bytes": statistics.median(engine.sent_bytes[1:]),
                "planned_bytes": planned_bytes(stage, WIRES[wire]) if per_node == 1 else None,
            }
            for wire, engine in engines.items()
        }
        print("RESULT " + json.dumps(found), flush=True)
    comm.close()
    dist.destroy_process_group()


def planned_bytes(stage: int, precision: MixedPrecision) -> float:
    """What a rank of two sends in a step, by the plan: half of each collective, all-reduces twice that."""
    model = build_model("gpt2-demo", vocab_size=256, seq_len=SEQ_LEN, overrides=SIZES)
    found = messages(buffers_of(model, 2, list(model.blocks), precision=precision), STAGES[stage], precision)
    return sum(message.num_bytes * (1.0 if message.op == "all_reduce" else 0.5) for message in found)


def links(bandwidth: str, stage: int, rounds: int, per_node: int, wires: list[str]) -> dict[str, dict[str, float]]:
    """Two namespaces with this link between them, ``per_node`` ranks in each."""
    return result_of_ranks(__file__, [str(stage), str(rounds), str(per_node), *wires], bandwidth, per_node)


def loss(text: str, *, full: bool, wires: list[str]) -> dict[str, list[float]]:
    """Validation losses by wire, one for each seed."""
    seeds = (0, 1, 2) if full else (0,)
    sizes = ["6", "6", "384"] if full else ["4", "4", "128"]
    shape = ["--model.n-layer", sizes[0], "--model.n-head", sizes[1], "--model.n-embd", sizes[2]]
    shape += ["--seq-len", "128", "--micro-batch-size", "8"] if full else ["--seq-len", "64", "--micro-batch-size", "8"]
    steps = ["--max-steps", "2000" if full else "300", "--eval-interval", "0", "--eval-rows", "256", "--nproc", "2"]
    found: dict[str, list[float]] = {wire: [] for wire in wires}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for wire in wires:
                out = Path(folder) / f"{wire}-{seed}".replace(", ", "-")
                words = ["--data", "text", "--data.path", text, "--data.dir", f"{folder}/data", "--strategy", "zero2"]
                words += [*shape, *steps, "--seed", str(seed), "--out", str(out), *FLAGS[wire]]
                command = [sys.executable, "-m", "zeroshard", "train", *words]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr)
                found[wire].append(float(read_run(out).summary["val_loss"]))
                print(f"seed {seed}  {wire:16}  val_loss {found[wire][-1]:.4f}", flush=True)
    return found


def main() -> None:
    """See the module's docstring."""
    if sys.argv[1:2] == ["rank"]:
        address, stage, rounds, per_node, *wires = sys.argv[2:]
        rank_main(address, int(os.environ["RANK"]), int(stage), int(rounds), int(per_node), wires)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["links", "loss"])
    parser.add_argument("--bandwidth", nargs="+", default=["100Mbit/s", "1Gbit/s"])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-node", type=int, default=1, help="ranks in each node")
    # by nodes: of several ranks
    parser.add_argument("--wires", nargs="+", default=list(WIRES), choices=[*WIRES, BY_NODES])
    parser.add_argument("--text", default="input.txt", help="the text that `loss` trains on")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if args.what == "loss":
        found = loss(args.text, full=args.full, wires=args.wires)
        for wire, losses in found.items():
            mean = statistics.mean(losses)
            print(f"{wire:16}  {mean:.4f}  {mean / statistics.mean(found[args.wires[0]]) - 1:+.2%}")
        return
    for bandwidth in args.bandwidth:
        rows = links(bandwidth, args.stage, args.rounds, args.per_node, args.wires)
        first = rows[args.wires[0]]
        for wire, row in rows.items():
            planned = row["planned_bytes"]
            beside = f", {row['sent_bytes'] / planned:.4f} of the plan's" if planned else ""
            print(
                f"{bandwidth:>10}  {wire:16}  step {row['step_s']:7.3f} s  x {first['step_s'] / row['step_s']:.2f}  "
                f"cpu {row['cpu_s']:.3f} s  "
                f"sent {row['sent_bytes'] / 1e6:8.3f} MB, {row['sent_bytes'] / first['sent_bytes']:.4f} of "
                f"{args.wires[0]}'s{beside}",
                flush=True,
            )


if __name__ == "__main__":
    main()
