"""AdamW as docs/numerics.md has it, operation by operation, has the bits of PyTorch's on the CPU."""

import math

import pytest
import torch

NUM_STEPS, LR, BETA1, BETA2, EPS, DECAY = 3, 1e-3, 0.9, 0.999, 1e-8, 0.1


def fp32(number):
    return torch.tensor(number, dtype=torch.float64).float()


def fma(a, b, c):
    """Exact in float64 up to the sum, which then is rounded to fp32."""
    return (a.double() * b.double() + c.double()).float()


def _specified(p, grads):
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        p = p * fp32(1 - LR * DECAY)
        m = fma(fp32(1 - BETA1), g - m, m)
        v = fma(fp32(1 - BETA2) * g, g, v * fp32(BETA2))
        denominator = v.sqrt() / fp32(math.sqrt(1 - BETA2**t)) + fp32(EPS)
        p = p + (fp32(-LR / (1 - BETA1**t)) * m) / denominator
        yield p, m, v


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="where products are fused is of x86-64"
)
@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_adamw_is_what_the_page_says(settings):
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(4096, generator=random)
    grads = [torch.randn(4096, generator=random) * 0.01 for _ in range(NUM_STEPS)]
    param = torch.nn.Parameter(weights.clone())
    optim = torch.optim.AdamW([param], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, **settings)
    for grad, (p, m, v) in zip(grads, _specified(weights, grads), strict=True):
        param.grad = grad.clone()
        optim.step()
        state = optim.state[param]
        assert torch.equal(state["exp_avg"], m)
        assert torch.equal(state["exp_avg_sq"], v)
        if "fused" in settings:
            torch.testing.assert_close(param.detach(), p, rtol=2**-22, atol=1e-9)
        else:
            assert torch.equal(param.detach(), p)
