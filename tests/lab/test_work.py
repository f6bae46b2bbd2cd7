import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.lab.predict.work import STRIDED_SHARE, work_of, work_of_plain_loss


class _Works(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found.append(work_of(func, args, kwargs or {}, result))
        return result


def _works(call):
    with _Works() as works:
        call()
    return [work for work in works.found if work is not None]


def test_a_product_of_matrices_is_two_flops_for_each_multiplication():
    a, b = torch.zeros(3, 5), torch.zeros(5, 7)
    (work,) = _works(lambda: a @ b)
    assert (work.flops, work.num_bytes, work.dtype) == (2 * 3 * 5 * 7, 4 * (15 + 35 + 21), "float32")


def test_a_product_knows_how_its_factors_lie_in_memory():
    layer, x = torch.nn.Linear(5, 7, bias=False), torch.zeros(3, 5, requires_grad=True)
    works = _works(lambda: layer(x).square().sum().backward())
    assert [work.layout for work in works if work.shape] == ["nt", "tn", "nn"]
    assert {work.layout for work in works if not work.shape} == {None}
    batch = torch.zeros(2, 3, 3)
    assert [work.layout for work in _works(lambda: torch.bmm(batch.mT, batch.mT))] == ["tt"]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_four_flops_for_each_pair_and_feature_and_half_of_it_under_the_mask(causal):
    q = torch.zeros(2, 3, 16, 8)
    (work,) = _works(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=causal))
    assert work.attention
    assert work.flops == 4 * 2 * 3 * 16 * 16 * 8 // (2 if causal else 1)


def test_a_gelu_by_tanh_and_its_derivative_are_counted_by_elements_and_an_exact_one_is_not():
    x = torch.zeros(4, 6, requires_grad=True)
    works = _works(lambda: F.gelu(x, approximate="tanh").sum().backward())
    assert [work.num_gelus for work in works if work.num_gelus] == [24, 24]
    assert all(work.num_gelus == 0 for work in _works(lambda: F.gelu(x)))


def _lost(call):
    return [work.lost_bytes / work.num_bytes for work in _works(call) if not work.shape]


def test_bytes_that_are_not_moved_in_memory_s_order_and_rows_that_are_read_twice_cost_more_on_a_gpu():
    x, strided = torch.zeros(8, 4, 2048), 1 / STRIDED_SHARE - 1
    assert _lost(lambda: torch.cat([x, x])) == [pytest.approx(strided)]
    assert _lost(lambda: x.transpose(0, 1).contiguous()) == [pytest.approx(strided, rel=1e-3)]
    assert _lost(lambda: x.sum((0, 1))) == [pytest.approx(strided, rel=1e-3)]
    assert _lost(lambda: (x.clone(), x.sum(-1), x + x)) == [0, 0, 0]
    assert _lost(lambda: x.log_softmax(-1)) == [pytest.approx(1 / 2)]
    assert _lost(lambda: x[..., :1024].log_softmax(-1))[-1] == 0


def test_a_plain_loss_moves_what_its_operations_move_beyond_the_fused_one():
    rows, vocab = 64, 4096
    hidden, weight = (torch.zeros(size, 8, dtype=torch.bfloat16, requires_grad=True) for size in (rows, vocab))
    targets = torch.zeros(rows, dtype=torch.int64)
    plain = _works(lambda: F.cross_entropy((hidden @ weight.t()).float(), targets).backward())
    moved = sum(work.num_bytes + work.lost_bytes for work in plain if not work.shape)
    fused, picked = 2 * 2 * rows * vocab, 2 * 4 * rows * vocab  # a target's log-softmax counts as if all were read
    assert work_of_plain_loss(rows * vocab, 2).num_bytes == pytest.approx(moved - fused - picked, rel=0.01)
