"""Reductions of dtypes that torch does not add."""

import pytest
import torch

from zeroshard.comm import RingCommunicator, run_threads, thread_transports
from zeroshard.comm.reductions import COMBINE

UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]
IN_PYTHON = {"sum": lambda a, b: a + b, "product": lambda a, b: a * b, "max": max, "min": min}


@pytest.mark.parametrize("op", COMBINE)
@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_integers_wrap_around_and_compare_as_such(dtype, op):
    most = torch.iinfo(dtype).max
    a, b = [0, 1, most, most, most // 2, 7], [0, most, most, 1, most // 2 + 1, 5]
    out = torch.empty(6, dtype=dtype)
    COMBINE[op](torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), out=out)
    assert out.tolist() == [IN_PYTHON[op](x, y) % (most + 1) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("op", COMBINE)
@pytest.mark.parametrize("dtype", NARROW)
def test_numbers_of_eight_bits_are_computed_in_fp32_and_rounded(dtype, op):
    a, b = torch.tensor([1.0, -2.5, 16.0]).to(dtype), torch.tensor([0.5, 3.0, 1.0]).to(dtype)
    assert COMBINE[op](a, b, out=a) is a
    expected = [IN_PYTHON[op](x, y) for x, y in ((1.0, 0.5), (-2.5, 3.0), (16.0, 1.0))]
    assert torch.equal(a.float(), torch.tensor(expected).to(dtype).float())


@pytest.mark.redundant(but=["dtype2-6"])
@pytest.mark.parametrize("numel", [6, 30_000])
@pytest.mark.parametrize("dtype", [*UNSIGNED, *NARROW])
def test_rings_and_threads_reduce_every_dtype(dtype, numel):
    ends = thread_transports(3, timeout_s=60)

    def on_rank(comm):
        ring, results = RingCommunicator(transport=ends[comm.rank]), []
        for each in (comm, ring):
            tensor = (torch.arange(numel) % 2 + comm.rank).to(dtype)
            each.all_reduce(tensor).wait()
            shard = torch.empty(numel // 3, dtype=dtype)
            each.reduce_scatter(shard, (torch.arange(numel) % 2 + comm.rank).to(dtype)).wait()
            results.append((tensor.float().tolist(), shard.float().tolist()))
        ring.close()
        return results

    expected = [3.0 * (i % 2) + 3 for i in range(numel)]
    for rank, results in enumerate(run_threads(on_rank, 3)):
        own = expected[rank * numel // 3 : (rank + 1) * numel // 3]
        assert results == [(expected, own)] * 2
