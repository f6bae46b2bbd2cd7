"""Kernels run in Triton's interpreter where there is no GPU, on the GPU where there is one; outputs start as NaN."""

import pytest
import torch

from zeroshard.kernels.launch import HAS_TRITON, INTERPRETED

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and DEVICE != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device():
    return torch.device(DEVICE)


@pytest.fixture
def compiler():
    """Our kernels under torch.compile, which cannot look into a `torch.empty` that is not torch's."""
    if not HAS_TRITON:
        pytest.skip("needs Triton")
    torch.compiler.reset()


@pytest.fixture
def triton(monkeypatch):
    """The word for our kernels; and every tensor that they allocate is NaN until it is written."""
    if not HAS_TRITON:
        pytest.skip("needs Triton")
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    return "triton"


def _poisoned(make):
    def make_poisoned(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.is_floating_point() and made.device.type != "meta":
            made.fill_(float("nan"))
        return made

    return make_poisoned


@pytest.fixture
def random(device):
    """`random(*shape, dtype=...)`: normal numbers, the same ones in the same order in each test."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    return draw
