"""Every optimizer that torch ships computes at each stage what it computes in one process, or is refused by name.

In float64, so that what a sign or a small denominator makes of rounding stays far below what a mistake would make.
Between the stages the bits are equal: losses, gradient norms and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.comm import run_threads
from zeroshard.lab.audit.optimizers import torch_optimizers
from zeroshard.models import build_model
from zeroshard.zero import STAGES, Zero

VOCAB, SEQ_LEN, WORLD_SIZE, NUM_MICRO, NUM_STEPS, MAX_NORM = 31, 8, 3, 2, 3, 0.5
REFUSED = {"LBFGS": "calls the closure again", "SparseAdam": "does not support dense gradients"}
KEY_BIAS = slice(9, 18)  # of attention's bias: softmax does not see it, so its gradient is rounding alone
CLASSES = {cls.__name__: cls for cls in torch_optimizers()}


def _model() -> nn.Module:
    model = build_model(
        "gpt2-demo", vocab_size=VOCAB, seq_len=SEQ_LEN, overrides={"n_layer": 2, "n_head": 3, "n_embd": 9}
    )
    return model.double()


def _batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = (step * NUM_MICRO + micro) * WORLD_SIZE + rank
    tokens = torch.randint(0, VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def _optimizers(name: str, model: nn.Module, make: Callable[..., Optimizer]) -> list[Optimizer]:
    """The class in two groups; beside AdamW where it takes matrices alone."""
    params = list(model.parameters())
    matrices = [param for param in params if param.dim() == 2]
    others = [param for param in params if param.dim() != 2]
    if name == "Muon":
        return [make(torch.optim.AdamW, others, lr=1e-3), make(torch.optim.Muon, matrices, lr=1e-2)]
    return [make(CLASSES[name], [{"params": matrices}, {"params": others, "lr": 1e-3}], lr=1e-2)]


def _one_process(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _model()
    optims = _optimizers(name, model, lambda cls, params, **kwargs: cls(params, **kwargs))
    norms = []
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            for rank in range(WORLD_SIZE):
                (model(*_batch(step, micro, rank)) / (NUM_MICRO * WORLD_SIZE)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        for optim in optims:
            optim.step()
        model.zero_grad()
    return norms, dict(model.state_dict())


def _train(comm: Any, name: str, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _model()
    zero = Zero(model, stage=stage, comm=comm, accumulate="local")
    optims = _optimizers(name, model, zero.optimizer)
    norms = []
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            with zero.micro_batch(last=micro == NUM_MICRO - 1):
                (model(*_batch(step, micro, comm.rank)) / NUM_MICRO).backward()
        norms.append(zero.clip_grad_norm_(MAX_NORM).item())
        for optim in optims:
            optim.step()
        zero.zero_grad()
    return norms, dict(zero.state_dict())


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in REFUSED])
def test_every_stage_equals_one_process_and_one_another(name):
    expected_norms, expected = _one_process(name)
    first = None
    for stage in STAGES:
        for norms, weights in run_threads(lambda comm, stage=stage: _train(comm, name, stage), WORLD_SIZE):
            first = first or (norms, weights)
            assert norms == first[0]
            assert norms == pytest.approx(expected_norms, abs=1e-9)
            for key, whole in expected.items():
                if name == "Rprop" and key.endswith("c_attn.bias"):
                    whole[KEY_BIAS] = weights[key][KEY_BIAS]  # it moves by the sign of a gradient, here of nothing
                assert torch.equal(weights[key], first[1][key]), f"stage {stage}: {key} has other bits than stage 0"
                torch.testing.assert_close(weights[key], whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stage", STAGES)
def test_or_is_refused_by_name_with_the_reason(stage, name):
    def go(comm):
        with pytest.raises(ValueError, match=f"{name} cannot be sharded: it .*{REFUSED[name]}"):
            Zero(_model(), stage=stage, comm=comm).optimizer(CLASSES[name])

    run_threads(go, 2)
