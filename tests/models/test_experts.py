"""Mixtures of experts of `transformers` on ranks that use different experts: no rank waits for another, equal weights.

If each rank gathered the experts that its own tokens go to, ranks would wait for each other for ever
(https://github.com/deepspeedai/DeepSpeed/issues/7461, https://github.com/huggingface/trl/issues/5712).

`transformers` 5 keeps the experts of a block in two stacked parameters, and each kind is trained so. And it is trained
with a module for each expert, as `transformers` 4 and the code of many models on the Hub have them: then each expert is
a unit of its own, inside of the block's.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache, partial
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_models import SEQ_LEN, VOCAB_SIZE, make_model
from soak import soaking
from zeroshard.comm import Communicator, run_threads
from zeroshard.zero import Zero

WORLD_SIZE, NUM_EXPERTS, NUM_STEPS = 3, 8, 4
KINDS = {
    "qwen3_moe": {"num_experts": NUM_EXPERTS, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": NUM_EXPERTS},
}

Allowed = Callable[[int, int], tuple[range, int]]  # (rank, step) -> the experts of a rank's tokens, and top-k


_model = cache(lambda kind: make_model(kind, **KINDS[kind]))
_once = Lock()  # ranks are threads, and the model is drawn from the process's generator


class OneExpert(nn.Module):
    """An expert with weights of its own."""

    def __init__(self, gate_up: Tensor, down: Tensor, act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up, self.down = (nn.Parameter(weight.detach().clone()) for weight in (gate_up, down))
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> the same."""
        gate, up = nn.functional.linear(x, self.gate_up).chunk(2, dim=-1)
        return nn.functional.linear(self.act_fn(gate) * up, self.down)


class ExpertModules(nn.ModuleList):
    """The same experts as modules, of which a rank calls those that its tokens go to."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, hidden]; chosen and weights [tokens, top_k]."""
        total = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            tokens, place = torch.where(chosen == number)
            total = total.index_add(0, tokens, self[number](hidden[tokens]) * weights[tokens, place, None])
        return total


class Routed:
    """A model whose routers choose among the experts that ``allowed`` names for the rank and the step at hand."""

    def __init__(self, kind: str, form: str, allowed: Allowed, reentrant: bool | None) -> None:
        with _once:
            self.model = deepcopy(_model(kind)).train()
        self.rank = self.step = 0
        self.hit: list[set[int]] = []  # experts, by block
        layers = self.model.model.layers
        for layer in layers:
            layer.mlp.gate.register_forward_hook(partial(self._route, allowed))
            if form == "modules":
                stacked = layer.mlp.experts
                pairs = zip(stacked.gate_up_proj, stacked.down_proj, strict=True)
                layer.mlp.experts = ExpertModules(OneExpert(*pair, stacked.act_fn) for pair in pairs)
        self.units = [*layers, *(each for layer in layers if form == "modules" for each in layer.mlp.experts)]
        if reentrant is not None:
            old = self.model.gradient_checkpointing_enable  # its name in earlier versions of `transformers`
            enable = getattr(self.model, "activation_checkpointing_enable", old)
            enable({"use_reentrant": reentrant, "preserve_rng_state": False})

    def _route(self, allowed: Allowed, gate: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        experts, top_k = allowed(self.rank, self.step)
        logits = output[0]
        shut = torch.ones(NUM_EXPERTS, dtype=torch.bool)
        shut[list(experts)] = False
        weights, chosen = torch.softmax(logits.masked_fill(shut, -torch.inf), dim=-1).topk(top_k, dim=-1)
        self.hit.append(set(chosen.unique().tolist()))
        return logits, weights, chosen

    def backward(self, rank: int, step: int) -> None:
        """Backward of the loss on a rank's rows of a step."""
        self.rank, self.step = rank, step
        tokens = torch.randint(3, VOCAB_SIZE, (2, SEQ_LEN), generator=torch.Generator().manual_seed(step * 10 + rank))
        self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()


def trained(comm: Communicator, stage: int, case: tuple) -> tuple[dict[str, Tensor], list[set[int]]]:
    routed = Routed(*case)
    zero = Zero(routed.model, stage, routed.units, comm)
    adam = zero.optimizer(torch.optim.AdamW, lr=0.01)
    for step in range(NUM_STEPS):
        routed.backward(comm.rank, step)
        zero.clip_grad_norm_(1.0)
        adam.step()
        adam.zero_grad()
    return zero.state_dict(), routed.hit


@cache
def one_process(case: tuple) -> dict[str, Tensor]:
    routed = Routed(*case)
    params = list(routed.model.parameters())
    adam = torch.optim.AdamW(params, lr=0.01)
    for step in range(NUM_STEPS):
        for rank in range(WORLD_SIZE):
            routed.backward(rank, step)
        for param in params:
            if param.grad is not None:
                param.grad /= WORLD_SIZE
        nn.utils.clip_grad_norm_(params, 1.0)
        adam.step()
        adam.zero_grad()
    return {name: param.detach().clone() for name, param in routed.model.named_parameters()}


def hits_of_equal_stages(*case: Any, stages: Iterable[int] = (1, 3)) -> list[list[set[int]]]:
    """Train at ``stages``, with --soak at all; the experts of each rank's tokens, by block and step, at stage 3."""
    stages = range(4) if soaking() else stages
    by_stage = [run_threads(lambda comm, stage=stage: trained(comm, stage, case), WORLD_SIZE) for stage in stages]
    expected = one_process(case)
    for by_rank in by_stage:
        for weights, _ in by_rank:
            for name, whole in expected.items():
                torch.testing.assert_close(weights[name], whole, rtol=0, atol=2e-5)
                assert torch.equal(weights[name], by_stage[0][0][0][name]), name
    return [hit for _, hit in by_stage[-1]]


SOAK = pytest.mark.soak
each_model = pytest.mark.parametrize(
    ("kind", "form"),
    [("qwen3_moe", "modules"), ("mixtral", "stacked")]
    + [pytest.param(*model, marks=SOAK) for model in (("qwen3_moe", "stacked"), ("mixtral", "modules"))],
)


@pytest.mark.redundant
@each_model
def test_ranks_whose_tokens_go_to_disjoint_experts(kind, form):
    allowed = lambda rank, step: (range(2 * rank, 2 * rank + 2), 1)  # noqa: E731
    hits = hits_of_equal_stages(kind, form, allowed, None, stages=range(4))
    assert set.union(*hits[0], *hits[1]) <= {0, 1, 2, 3}
    assert not set.union(*hits[0]) & set.union(*hits[1])
    assert not set.union(*hits[1]) & set.union(*hits[2])


@pytest.mark.redundant
@each_model
def test_experts_that_get_no_token(kind, form):
    """In the second step the last ranks' tokens go to no expert but one; others get none on any rank, in any step."""
    hits = hits_of_equal_stages(kind, form, lambda rank, step: (range(1 if step == 1 and rank else 4), 1), None)
    assert set.union(*(experts for hit in hits for experts in hit)) <= {0, 1, 2, 3}
    assert hits[1][2:4] == [{0}, {0}]  # two blocks


@pytest.mark.redundant
@each_model
def test_a_top_k_that_changes_between_steps(kind, form):
    hits = hits_of_equal_stages(kind, form, lambda rank, step: (range(rank, rank + 5), 1 + (step + rank) % 4), None)
    assert len(hits[0][6]) >= 4 > len(hits[1][6]) - 4  # in the fourth step of rank 0 each token goes to four


@pytest.mark.redundant
@pytest.mark.pairwise("kind")
@pytest.mark.parametrize("reentrant", [False, True])
@each_model
def test_blocks_that_are_recomputed(kind, form, reentrant):
    hits = hits_of_equal_stages(kind, form, lambda rank, step: (range(2 * rank, 2 * rank + 2), 1 + step % 2), reentrant)
    assert [len(hit) for hit in hits] == [2 * 2 * NUM_STEPS] * WORLD_SIZE  # two blocks, each twice a step
