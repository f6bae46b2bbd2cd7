"""What a captured step needs: weights, masters and states lie where they lay, from step to step."""

import pytest
import torch

from nets import WIDTH
from zeroshard.comm import run_threads
from zeroshard.zero import MixedPrecision, Zero


def _addresses(zero, optim):
    found = {}
    for number, group in enumerate(zero._runtime.groups()):
        found |= {(number, "full"): group.params.full.data_ptr(), (number, "master"): group.params.master.data_ptr()}
    for number, state in enumerate(optim.state.values()):
        found |= {(number, name): value.data_ptr() for name, value in state.items()}
    average = {("ema", shard.name): shard.tensor.data_ptr() for shard in zero.named_shards() if shard.kind == "ema"}
    assert average
    return found | average


@pytest.mark.redundant
@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_outlives_a_step_keeps_its_address(stage, precision):
    """At stage 3 unsharded weights do not outlive their use: they alone may come back elsewhere."""

    def on_rank(comm):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        zero = Zero(model, stage, units=list(model)[1:], comm=comm, precision=precision)
        optim, ema = zero.optimizer(torch.optim.AdamW, lr=1e-3), zero.ema(0.9)
        seen = []
        for _ in range(4):
            for last in (False, True):
                with zero.micro_batch(last=last):
                    model(torch.ones(2, WIDTH)).sum().backward()
            zero.clip_grad_norm_(1.0)
            optim.step()
            ema.update()
            optim.zero_grad()
            seen.append(_addresses(zero, optim))
        return seen

    for _, second, *later in run_threads(on_rank, 2):
        changed = {what for each in later for what, place in each.items() if place != second[what]}
        assert {name for _, name in changed} <= ({"full"} if stage == 3 else set())
