import math

import pytest
import torch
from torch import nn

from nets import Net, rows
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero import STAGES, FlatLayout, RankGroups, Zero
from zeroshard.zero.core.gradients import Gradients, clip_, global_norm

CPU = torch.device("cpu")


def _reduced(row, comm, gradient):
    layout, dtype = FlatLayout.of([("a", gradient.shape)], comm.world_size), gradient.dtype
    grads = Gradients("a", layout, row, RankGroups.of(comm), device=CPU, reduced_dtype=dtype, reduce_dtype=dtype)
    grads.accumulate(0, gradient)
    grads.reduce()
    grads.wait_for_reduce()
    return grads


@pytest.mark.parametrize("stage", STAGES)
def test_partial_sums_are_added_in_the_order_of_ranks(stage):
    """One is lost behind 2^53, and two are not."""

    def go(comm):
        grads = _reduced(STAGES[stage], comm, torch.tensor([2.0**53, 1.0, 1.0], dtype=torch.float64))
        grads.reduced.round_()  # a third three times over
        return global_norm([grads], comm, 1.0, CPU).item()

    assert run_threads(go, 3) == [2.0**53] * 3


def test_clipping_scales_as_torch_does_and_only_down():
    buffers = [_reduced(STAGES[0], LocalCommunicator(), torch.randn(size)) for size in (5, 1, 12)]
    before = [grads.reduced.clone() for grads in buffers]
    clip_(buffers, torch.tensor(2.0, dtype=torch.float64), 1e9)
    assert all(torch.equal(grads.reduced, old) for grads, old in zip(buffers, before, strict=True))
    clip_(buffers, torch.tensor(2.0, dtype=torch.float64), 1.0)
    for grads, old in zip(buffers, before, strict=True):
        torch.testing.assert_close(grads.reduced, old * (1.0 / (2.0 + 1e-6)))
    tiny = [grads.reduced.clone() for grads in buffers]
    clip_(buffers, torch.tensor(1e-6, dtype=torch.float64), 1e-6)  # what torch adds to the norm is as large as it
    for grads, old in zip(buffers, tiny, strict=True):
        torch.testing.assert_close(grads.reduced, old * 0.5)
    clip_(buffers, torch.tensor(math.nan, dtype=torch.float64), 1.0)
    assert all(grads.reduced.isnan().all() for grads in buffers)


@pytest.mark.pairwise("norm_type")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_is_torchs_on_the_averaged_gradients(norm_type, max_norm):
    net = Net()
    for rank in range(3):
        (net(rows(rank)).square().mean() / 3).backward()
    expected = nn.utils.clip_grad_norm_(net.parameters(), max_norm, norm_type)
    norms, grads = [], []
    for stage in STAGES:

        def go(comm, stage=stage):
            ours = Net()
            zero = Zero(ours, stage=stage, comm=comm)
            ours(rows(comm.rank)).square().mean().backward()
            return zero.clip_grad_norm_(max_norm, norm_type), zero.full_grads()

        for norm, full in run_threads(go, 3):
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
            assert norm.dim() == 0
            norms.append(norm)
            grads.append(full)
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    for full in grads:
        for name, param in net.named_parameters():
            torch.testing.assert_close(full[name], param.grad, rtol=0, atol=1e-6)
            assert torch.equal(full[name], grads[0][name])


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_zero_without_gradients_and_nan_with_a_nan(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        norms = [zero.clip_grad_norm_(1.0), zero.clip_grad_norm_(1.0, math.inf)]
        x = rows(comm.rank)
        x[0] = math.nan if comm.rank else 0.0
        net(x).sum().backward()
        norms += [zero.clip_grad_norm_(1.0, p) for p in (1.0, 2.0, math.inf)]
        grads = zero.full_grads()
        return [norm.item() for norm in norms], all(grad.isnan().any() for grad in grads.values())

    for norms, all_nan in run_threads(go, 2):
        assert norms[:2] == [0.0, 0.0]
        assert all(math.isnan(norm) for norm in norms[2:])
        assert all_nan


def test_a_norm_type_that_is_none_is_refused():
    zero = Zero(Net(), comm=LocalCommunicator())
    for wrong in (0, -1, math.nan):
        with pytest.raises(ValueError, match=r"norm_type: .* is not a positive number"):
            zero.clip_grad_norm_(1.0, wrong)
