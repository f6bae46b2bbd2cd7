"""Gradients that wait in bfloat16 for optimizers over fp32 weights."""

import copy

import pytest
import torch
from torch import nn

from nets import Net, rows
from zeroshard import Zero
from zeroshard.comm import LocalCommunicator
from zeroshard.zero import STAGES, MixedPrecision

ROUNDED = MixedPrecision(reduce_dtype=torch.bfloat16)


class _Counts(torch.optim.Optimizer):
    """Of nobody's: it counts its steps, and keeps the dtypes of the gradients that it has seen."""

    zero_reach = "element-wise"

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.steps, self.dtypes = 0, set()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.dtypes.add(param.grad.dtype)
                    param.sub_(param.grad, alpha=group["lr"])
        return loss


def _engine(stage=2, cls=torch.optim.SGD, **settings):
    net = Net()
    zero = Zero(net, stage=stage, units=net.blocks, comm=LocalCommunicator(), precision=ROUNDED)
    return net, zero, zero.optimizer(cls, lr=0.1, **settings)


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (_Counts, {}),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_updates_as_by_gradients_that_were_rounded(stage, cls, settings):
    net, zero, optim = _engine(stage, cls, **settings)
    plain = copy.deepcopy(Net())
    theirs = cls(plain.parameters(), lr=0.1, **settings)
    for step in range(3):
        net(rows(step)).sum().backward()
        plain(rows(step)).sum().backward()
        for param in plain.parameters():
            if param.grad is not None:
                param.grad = param.grad.to(torch.bfloat16).float()
        optim.step()
        theirs.step()
        optim.zero_grad()
        theirs.zero_grad()
    for name, full in zero.state_dict().items():
        assert torch.equal(full, plain.state_dict()[name]), name


def test_hooks_of_a_step_run_once_and_gradients_are_narrow_before_and_after():
    net, _, optim = _engine()
    heard = []
    optim.register_step_pre_hook(lambda *_: heard.append("before"))
    optim.register_step_post_hook(lambda *_: heard.append("after"))
    net(rows(0)).sum().backward()
    weight = net.blocks[0].weight
    assert weight.grad.dtype == torch.bfloat16
    optim.step()
    assert heard == ["before", "after"]
    assert weight.grad.dtype == torch.bfloat16
    assert all(param is not None for group in optim.param_groups for param in group["params"])
    assert optim.param_groups[0]["params"][0] is next(net.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_has_fp32_s_digits(stage):
    model = nn.Linear(1000, 1, bias=False)
    zero = Zero(model, stage=stage, comm=LocalCommunicator(), precision=ROUNDED)
    zero.optimizer(torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 1000)).sum().backward()
    norm = 1000**0.5
    assert float(torch.nn.utils.get_total_norm([model.weight.grad])) == pytest.approx(norm, rel=1e-2)
    assert float(zero.clip_grad_norm_(1e9)) == pytest.approx(norm, rel=1e-6)
