"""What each ZeRO stage holds on a rank: measured in short runs, and held against what the stage table predicts.

    python examples/stages_memory.py [--ranks 2] [--model gpt2-demo | --run RUN]

Ranks are threads of this process. Bytes are taken between the second backward and its step, when weights, gradients
and optimizer state are all there. Exit status 1 if any rank holds another number of bytes than predicted.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import torch

from zeroshard.comm import Communicator, run_threads
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.models import LanguageModel, build_model
from zeroshard.train.inference.generate import load_for_text
from zeroshard.zero import STAGES, Zero

CATEGORIES = ("params", "grads", "optimizer")
SEQ_LEN, MIB = 32, 2**20


def measure(comm: Communicator, model: LanguageModel, stage: int) -> dict[str, int]:
    """Bytes by category on this rank after a step and a backward."""
    model = copy.deepcopy(model).train()
    zero = Zero(model, stage=stage, units=model.blocks, comm=comm)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    model(tokens, tokens).backward()
    optim.step()
    optim.zero_grad()
    model(tokens, tokens).backward()
    return zero.memory_bytes()


def predict(model: LanguageModel, stage: int, rank: int, world_size: int) -> dict[str, int]:
    """The same from shapes alone."""
    buffers = buffers_of(model, world_size, model.blocks)
    return state_bytes(buffers, STAGES[stage], rank, OPTIMIZER_STATES["AdamW"])


def main() -> int:
    """Print the table; 0 if every prediction was right."""
    parser = argparse.ArgumentParser(description="Memory of training state on a rank at each ZeRO stage.")
    parser.add_argument("--ranks", type=int, default=2, help="thread ranks (default: 2)")
    parser.add_argument("--model", default="gpt2-demo", help="preset to build (default: gpt2-demo)")
    parser.add_argument("--run", default="", help="a run whose model is taken instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_for_text(Path(args.run))[0] if args.run else build_model(args.model)

    size = sum(param.numel() for param in model.parameters())
    print(f"{args.run or args.model}, {size:,} parameters, AdamW, fp32: MiB on rank 0 of {args.ranks}, measured\n")
    print("stage" + "".join(f"{name:>11}" for name in (*CATEGORIES, "total", "predicted")))
    all_right = True
    for stage in STAGES:
        by_rank = run_threads(lambda comm, stage=stage: measure(comm, model, stage), args.ranks)
        predicted = [predict(model, stage, rank, args.ranks) for rank in range(args.ranks)]
        all_right &= by_rank == predicted
        cells = [*(by_rank[0][category] for category in CATEGORIES), sum(by_rank[0].values())]
        row = "".join(f"{num_bytes / MIB:>11.2f}" for num_bytes in (*cells, sum(predicted[0].values())))
        print(f"{stage:>5}{row}{'' if by_rank == predicted else '   differs'}")
    print("\nEvery rank holds what was predicted, to the byte." if all_right else "\nThe prediction is wrong.")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
