"""What each ZeRO stage holds on a rank: measured in short runs, beside what the stage table predicts.

    python examples/stages_memory.py [--ranks 2] [--model gpt2-demo]

Ranks are threads of this process. Bytes are taken between the second backward and its step, when weights, gradients
and optimizer state are all there. Exit status 1 if any rank holds another number of bytes than predicted.
"""

from __future__ import annotations

import argparse
import sys

import torch

from zeroshard.comm import Communicator, run_threads
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.models import build_model
from zeroshard.zero import STAGES, Zero

CATEGORIES = ("params", "grads", "optimizer")
SEQ_LEN = 32


def measure(comm: Communicator, model_name: str, stage: int) -> dict[str, int]:
    """Bytes by category on this rank after a step and a backward."""
    with torch.device("meta"):
        model = build_model(model_name)
    zero = Zero(model, stage=stage, units=model.blocks, comm=comm, init=model.init_parameter)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    model(tokens, tokens).backward()
    optim.step()
    optim.zero_grad()
    model(tokens, tokens).backward()
    return zero.memory_bytes()


def predict(model_name: str, stage: int, rank: int, world_size: int) -> dict[str, int]:
    """The same from shapes alone."""
    with torch.device("meta"):
        model = build_model(model_name)
    buffers = buffers_of(model, world_size, model.blocks)
    return state_bytes(buffers, STAGES[stage], rank, OPTIMIZER_STATES["AdamW"])


def main() -> int:
    """Print the table; 0 if every prediction was right."""
    parser = argparse.ArgumentParser(description="Bytes of training state on a rank at each ZeRO stage.")
    parser.add_argument("--ranks", type=int, default=2, help="thread ranks (default: 2)")
    parser.add_argument("--model", default="gpt2-demo", help="preset to build (default: gpt2-demo)")
    args = parser.parse_args()
    torch.set_num_threads(1)

    print(f"{args.model}, AdamW, fp32, {args.ranks} ranks: bytes on rank 0, measured and predicted\n")
    print("stage" + "".join(f"{category:>12}{'predicted':>12}" for category in (*CATEGORIES, "total")))
    all_right = True
    for stage in STAGES:
        by_rank = run_threads(lambda comm, stage=stage: measure(comm, args.model, stage), args.ranks)
        predicted = [predict(args.model, stage, rank, args.ranks) for rank in range(args.ranks)]
        all_right &= by_rank == predicted
        cells = [(by_rank[0][category], predicted[0][category]) for category in CATEGORIES]
        cells.append((sum(by_rank[0].values()), sum(predicted[0].values())))
        row = "".join(f"{measured:>12,}{expected:>12,}" for measured, expected in cells)
        print(f"{stage:>5}{row}{'' if by_rank == predicted else '   differs'}")
    print("\nEvery rank holds what was predicted." if all_right else "\nThe prediction is wrong.")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
