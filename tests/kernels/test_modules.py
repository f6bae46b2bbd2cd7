import pytest
import torch

from exactness import assert_near, assert_same_bits, run
from zeroshard.kernels import LayerNorm, RMSNorm


@pytest.mark.parametrize(("module", "torchs"), [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm)])
def test_modules_are_drop_in(module, torchs, triton, random, device):
    torch.manual_seed(0)
    mine, theirs = module(24, 1e-5, kernels=triton, device=device), torchs(24, 1e-5, device=device)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict({name: random(24) for name in theirs.state_dict()})
    mine.load_state_dict(theirs.state_dict())
    x, residual = random(3, 24), random(3, 24)
    assert isinstance(mine, torchs)
    assert_near(mine(x), theirs.double()(x.double()))
    y, h = mine(x, residual)
    assert torch.equal(h, x + residual)
    assert_near(y, theirs(h.double()))


@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_the_reference_has_torch_s_bits(module, random, device):
    theirs = {LayerNorm: torch.nn.LayerNorm, RMSNorm: torch.nn.RMSNorm}[module](24, 1e-5, device=device)
    mine = module(24, 1e-5, kernels="reference", device=device)
    x, dy = random(3, 24), random(3, 24)
    assert_same_bits(run(mine, [x], [dy]), run(theirs, [x], [dy]))


def test_modules_normalise_one_dimension():
    with pytest.raises(ValueError, match=r"^normalized_shape: \(4, 8\) has 2 dimensions"):
        LayerNorm((4, 8))
