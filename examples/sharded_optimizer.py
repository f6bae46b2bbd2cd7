"""An optimizer's state shared out among the ranks, beside torch's DistributedDataParallel.

    torchrun --standalone --nproc-per-node=2 examples/sharded_optimizer.py

Two models are trained alike: one with AdamW on every rank, one with `ShardedOptimizer`. Then the sharded state is
brought together and loaded into a plain AdamW. Exit status 1 unless the weights have the same bits all along.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard import ShardedOptimizer
from zeroshard.host.launch.process_group import shutdown

WIDTH, NUM_STEPS = 64, 10


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range, device: torch.device) -> None:
    """The loop is the same for both optimizers."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (1 + step))
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        rows = torch.randn(8, WIDTH, generator=generator).to(device)
        (model(rows) - rows).square().mean().backward()
        optim.step()
        optim.zero_grad()
        schedule.step()


def state_bytes(optim: torch.optim.Optimizer) -> int:
    """Bytes of the state that this rank holds."""
    return sum(value.nbytes for state in optim.state.values() for value in state.values())


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def main() -> int:
    """Train both; 0 if they agree."""
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    plain_model = DistributedDataParallel(build().to(device))
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)
    train(plain_model, plain, range(NUM_STEPS), device)

    model = DistributedDataParallel(build().to(device))
    optim = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, fused=True)
    train(model, optim, range(NUM_STEPS), device)
    agree = same_bits(model, plain_model)

    held = torch.tensor([state_bytes(optim), state_bytes(plain)])
    by_rank = [torch.empty_like(held) for _ in range(world_size)]
    dist.all_gather(by_rank, held)

    optim.consolidate_state_dict(to=0)  # on every rank
    if rank == 0:
        for other, (ours, whole) in enumerate(by_rank):
            print(f"rank {other} holds {ours:,} of {whole:,} bytes of AdamW's state")
        unsharded = torch.optim.AdamW(copy.deepcopy(model.module).parameters(), lr=1e-2, fused=True)
        unsharded.load_state_dict(optim.state_dict())
        pairs = zip(unsharded.state.values(), plain.state.values(), strict=True)
        agree &= all(torch.equal(state[key], value) for state, expected in pairs for key, value in expected.items())
        print("Weights and state have the bits of the unsharded run." if agree else "The runs differ.")
    del model, plain_model, optim, plain
    shutdown()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
