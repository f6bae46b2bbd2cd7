import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from zeroshard.host.errors import UserError
from zeroshard.kernels import block_formats, dequantise, dequantised_sum, quantise
from zeroshard.settings.wire_formats import FORMATS, WEIGHT_FORMATS, BlockFormat, DtypeFormat, rounding_key

TINY = 2.0**-126
LARGEST = {"int8": 127, "int4": 7, "e4m3": 448}


def _there_and_back(values, form, key=None, kernels="reference"):
    packed = torch.full((form.num_bytes(values.numel()),), 0xAA, dtype=torch.uint8, device=values.device)
    quantise(values, packed, form, key, kernels=kernels)
    back = torch.full_like(values, float("nan"))
    dequantise(packed, back, form, kernels=kernels)
    return packed, back


def _scales(values, form):
    """[n]: the scale of each element's block."""
    blocks = values.float().split(form.block)
    return torch.cat([(b.abs().max() / LARGEST[form.name]).clamp(min=TINY).expand_as(b) for b in blocks])


def _bound(values, form, times):
    """What an element may be off by, rounded to the nearest; ``times`` 2: stochastically."""
    scales = _scales(values, form).double()
    if form.name == "e4m3":
        return times * torch.maximum(values.double().abs() * 2.0**-4, scales * 2.0**-10)
    return times * scales / 2


@st.composite
def numbers(draw):
    """Up to some blocks of numbers of any size: zeros, denormals, a huge range, one element."""
    numel = draw(st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 100, 257, 1000]))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    exponents = draw(st.sampled_from([(0, 0), (-149, -140), (-149, 127), (-20, 0), (120, 127)]))
    powers = torch.randint(exponents[0], exponents[1] + 1, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) / 8 * 2.0 ** powers.double()
    zeros = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return torch.where(torch.rand(numel, generator=generator) < zeros, 0, values).float()


@given(numbers(), st.sampled_from(FORMATS), st.sampled_from([16, 48, 256]), st.booleans())
def test_what_arrives_is_off_by_no_more_than_the_bound(values, name, block, stochastic):
    form = BlockFormat(name, block)
    _, back = _there_and_back(values, form, rounding_key(0, 1, "blocks.0", 2) if stochastic else None)
    slack = 1 + 2.0**-15  # fp32's own rounding, and noise of 16 bits
    off = (back.double() - values.double()).abs()
    assert (off <= _bound(values, form, 2 if stochastic else 1) * slack).all()
    assert (back[values == 0] == 0).all()


@given(numbers(), st.sampled_from(FORMATS), st.integers(0, 10**6))
def test_what_a_code_holds_exactly_stays_and_noise_is_of_the_key_alone(values, name, seed):
    form, key = BlockFormat(name, 32), rounding_key(seed, 0, "root", 0)
    packed, back = _there_and_back(values, form, key)
    assert torch.equal(_there_and_back(values, form, key)[0], packed)
    again = _there_and_back(back, form, rounding_key(seed + 1, 0, "root", 0))[1]
    assert torch.allclose(again, back, rtol=1e-6, atol=2 * TINY)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_the_mean_of_stochastic_roundings_is_the_number(name, scale):
    form, num_blocks = BlockFormat(name, 64), 4000  # each block has a noise of its own
    values = torch.randn(64, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -3, 64) * scale
    back = _there_and_back(values.repeat(num_blocks), form, rounding_key(0, 0, "u", 0))[1]
    mean = back.view(num_blocks, 64).double().mean(0)
    # A rounding's deviation is at most half of the distance of two codes; six times that of the mean is never seen.
    allowed = 6 * _bound(values, form, 2) / 2 / math.sqrt(num_blocks) + _scales(values, form) * 2.0**-16
    assert ((mean - values).abs() <= allowed).all()


def test_the_noise_of_two_elements_ranks_steps_and_units_is_not_the_same():
    values = torch.full((512,), 0.5)
    values[::256] = 127.0
    form = BlockFormat("int8")
    keys = [rounding_key(*key) for key in [(0, 0, "a", 0), (1, 0, "a", 0), (0, 1, "a", 0), (0, 0, "b", 0)]]
    keys += [rounding_key(0, 0, "a", 1), rounding_key(0, 0, "a", 0, 1)]
    drawn = [_there_and_back(values, form, key)[1] for key in keys]
    for index, one in enumerate(drawn):
        assert 180 < (one == 1).sum() < 330  # of 510
        assert all((one != other).sum() > 150 for other in drawn[:index])
    many = torch.full((2000, 64), 0.5)
    many[:, 0] = 127.0
    up = _there_and_back(many.view(-1), BlockFormat("int8", 64), keys[0])[1].view(2000, 64) == 1
    for one, other in ((1, 2), (1, 3), (7, 40), (31, 63)):
        both = (up[:, one] & up[:, other]).double().mean()
        assert 0.2 < both < 0.3  # independent: 1/4


def test_noise_is_uniform_and_of_two_places_as_if_independent():
    table = block_formats._noise_table(torch.device("cpu"))[:, 0].double()
    odd = (table * 2**17).long()
    assert odd.sort().values.tolist() == [-65529] * 4 + list(range(-65527, 65528, 2)) + [65529] * 4
    spectrum = torch.fft.fft(table)
    alike = torch.fft.ifft(spectrum * spectrum.conj()).real  # by distance
    assert alike[1:256].abs().max() < 0.02 * alike[0]
    of_block = 1 + 2 * ((1 - torch.arange(1, 256) / 256) * alike[1:256]).sum() / alike[0]
    assert 0.9 < of_block < 1.1  # the variance of a block's sum, of 256 times that of an element
    for distance in (1, 2, 16, 128, 255):
        other = table.roll(-distance)
        for low, high in ((-0.25, 0.0), (0.0, 0.0), (0.25, -0.1)):
            both = ((table < low) & (other < high)).double().mean()
            assert abs(both - (low + 0.5) * (high + 0.5)) < 0.005


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_largest_number_of_a_block_is_never_rounded_past_the_largest_code(name):
    """Whatever the last bits of its scale and of the scale's reciprocal come to."""
    form, largest = BlockFormat(name, 16), LARGEST[name]
    most = torch.linspace(1, 2, 20001)
    ratio = most * (1 / (most / largest))
    assert (ratio > largest).any()
    extreme = block_formats._noise_table(torch.device("cpu"))[:, 0].max()
    assert ((ratio + extreme).round() == largest).all()
    values = torch.stack([most, -most], 1).view(-1)
    values = torch.cat([values, values.new_zeros(-len(values) % 16)])
    for seed in range(3):
        back = _there_and_back(values, form, rounding_key(seed, 0, "u", 0))[1]
        assert (back.abs() <= values.abs().view(-1, 16).amax(1).repeat_interleave(16) * (1 + 2.0**-20)).all()
        assert (back * values >= 0).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", [None, rounding_key(0, 0, "", 0)])
def test_a_block_that_is_not_finite_stays_so_and_the_others_are_as_before(name, bad, key):
    form = BlockFormat(name, 16)
    values = torch.randn(40, generator=torch.Generator().manual_seed(3))
    clean = _there_and_back(values, form, key)[1]
    values[20] = bad
    back = _there_and_back(values, form, key)[1]
    assert back[16:32].isnan().all()
    assert torch.equal(back[:16], clean[:16])
    assert torch.equal(back[32:], clean[32:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_with_nan_or_inf_has_a_nan_for_its_scale_and_arrives_as_nan(name, dtype, triton, device):
    """Among finite numbers and among zeros, alone and with others; the reference and the kernel alike."""
    form = BlockFormat(name, 16)
    blocks = torch.randn(7, 16, generator=torch.Generator().manual_seed(3))
    blocks[3:] = 0
    nan, inf = float("nan"), float("inf")
    for index, bad in ((0, [nan]), (1, [inf]), (3, [-inf]), (4, [nan, inf]), (5, [inf, -inf])):
        blocks[index, 5 : 5 + len(bad)] = torch.tensor(bad)
    is_bad = [True, True, False, True, True, True, False]
    values = blocks.view(-1)[:-3].to(device, dtype)
    for kernels in ("reference", triton):
        packed, back = _there_and_back(values, form, kernels=kernels)
        assert packed[: 4 * 7].view(torch.float32).isnan().tolist() == is_bad
        assert [bool(block.isnan().all()) for block in back.split(16)] == is_bad
        assert [bool(block.isfinite().any()) for block in back.split(16)] == [not bad for bad in is_bad]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", [BlockFormat("int8", 16), BlockFormat("int4", 16), DtypeFormat(torch.bfloat16)])
def test_what_has_arrived_is_read_and_not_written(form, triton, device):
    """What lies behind the codes is none of a reader's business: others may read the same memory, or write there."""
    for kernels in ("reference", triton):
        rows = torch.randint(1, 100, (2, form.num_bytes(21)), dtype=torch.uint8, device=device)
        before = rows.clone()
        own, found = torch.zeros(21, device=device), torch.empty(21, device=device)
        dequantise(rows[0], found, form, kernels=kernels)
        dequantised_sum(rows, own, 0, found, form, kernels=kernels)
        assert torch.equal(rows, before)


@pytest.mark.parametrize("numel", [1, 15, 16, 255, 256, 257, 5000])
def test_bytes_are_those_of_the_formula(numel):
    blocks = -(-numel // 256)
    for name, codes in (("int8", numel), ("e4m3", numel), ("int4", (numel + 1) // 2)):
        num_bytes = BlockFormat(name).num_bytes(numel)
        assert num_bytes % 16 == 0
        assert 0 <= num_bytes - (4 * blocks + codes) < 16
    assert DtypeFormat(torch.bfloat16).num_bytes(numel) == (2 * numel + 15) // 16 * 16
    assert BlockFormat("int8").num_bytes(2**20) <= 0.27 * 4 * 2**20
    assert BlockFormat("int4").num_bytes(2**20) <= 0.145 * 4 * 2**20


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_travel_as_fp32_would_and_a_dtype_is_a_format_too(dtype):
    values = torch.randn(300, generator=torch.Generator().manual_seed(5)).to(dtype)
    for name in FORMATS:
        packed, back = _there_and_back(values, BlockFormat(name))
        wide, wide_back = _there_and_back(values.float(), BlockFormat(name))
        assert torch.equal(packed, wide)
        assert torch.equal(back, wide_back.to(dtype))
    assert torch.equal(_there_and_back(values, DtypeFormat(torch.bfloat16))[1], values.bfloat16().to(dtype))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", [BlockFormat("int8", 32), BlockFormat("int4"), DtypeFormat(torch.bfloat16)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_sum_adds_rows_in_fp32_in_their_order(form, rank, triton, device, monkeypatch):
    monkeypatch.setattr(sys.modules["zeroshard.kernels.block_formats"], "_CHUNK", 256)
    parts = torch.randn(3, 700, generator=torch.Generator().manual_seed(2))
    rows = torch.zeros(3, form.num_bytes(700), dtype=torch.uint8)
    total = torch.zeros(700)
    for index, (part, row) in enumerate(zip(parts, rows, strict=True)):
        if index != rank:
            quantise(part, row, form, kernels="reference")
            dequantise(row, back := torch.empty(700), form, kernels="reference")
        total += part if index == rank else back
    for kernels in ("reference", triton):
        own = parts[rank].to(device, copy=True)
        dequantised_sum(rows.to(device), own, rank, own, form, kernels=kernels)
        assert torch.equal(own.cpu(), total)


def test_a_number_that_does_not_fit_is_named():
    for block in (0, -16, 24, 8, 8192, 2.0, True):
        with pytest.raises(UserError, match=f"^block: blocks of {block!r} elements do not pack"):
            BlockFormat("int8", block)
    with pytest.raises(UserError, match=r"^format: 'int3' is no block format; choose one of nf4, int8, int4, e4m3"):
        BlockFormat("int3")
    form, values = BlockFormat("int8"), torch.zeros(10)
    with pytest.raises(ValueError, match=r"^packed: torch.uint8 \(15,\); give a contiguous \[16\] of uint8"):
        quantise(values, torch.zeros(15, dtype=torch.uint8), form)
    with pytest.raises(ValueError, match=r"^values: torch.int64 is not supported"):
        quantise(values.long(), torch.zeros(16, dtype=torch.uint8), form)
    with pytest.raises(ValueError, match=r"^values: shape \(5,\), strides \(2,\); give a contiguous"):
        dequantise(torch.zeros(16, dtype=torch.uint8), values[::2], form)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize(
    ("name", "stochastic"), [("nf4", False), *((name, stochastic) for name in FORMATS for stochastic in (False, True))]
)
@pytest.mark.parametrize(
    ("numel", "block"),
    [(100, 48), pytest.param(1, 16, marks=pytest.mark.soak), pytest.param(5001, 256, marks=pytest.mark.soak)],
)
def test_kernels_have_the_bits_of_the_reference(name, stochastic, numel, block, triton, device):
    form, key = BlockFormat(name, block), rounding_key(7, 3, "blocks.1", 1) if stochastic else None
    generator = torch.Generator().manual_seed(numel)
    powers = torch.randint(-12, 3, (numel,), generator=generator).float()
    values = torch.randn(numel, generator=generator).mul_(2.0**powers).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        packed, back = _there_and_back(values.to(dtype), form, key)
        got, got_back = _there_and_back(values.to(dtype), form, key, triton)
        assert torch.equal(got, packed)
        torch.testing.assert_close(got_back, back, rtol=0 if dtype == torch.float32 else 2.0**-7, atol=0)  # interpreter
    values[numel // 2] = float("inf")
    expected = _there_and_back(values, form, key)[1]
    assert torch.equal(_there_and_back(values, form, key, triton)[1].nan_to_num(), expected.nan_to_num())
    assert expected.isnan().any()


class _DivisorsOnTheHost(TorchFunctionMode):
    """Collects the Python numbers by which tensors are divided."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("div", "div_", "divide", "divide_", "true_divide", "__truediv__", "__itruediv__"):
            self.found += [args[1]] if not isinstance(args[1], torch.Tensor) else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("key", [None, rounding_key(0, 0, "", 0)])
def test_the_reference_divides_by_no_host_number_but_powers_of_two(name, key):
    """On CUDA torch multiplies by the reciprocal of a number on the host: other bits than a CPU's, and the kernel's."""
    form, values = BlockFormat(name, 16), torch.randn(100)
    packed = torch.zeros(form.num_bytes(100), dtype=torch.uint8)
    with _DivisorsOnTheHost() as divisors:
        torch.randn(4) / 3
        block_formats.quantise_reference(values, packed, form, key)
        block_formats.dequantise_reference(packed, values, form)
    assert divisors.found[0] == 3
    assert all(math.frexp(divisor)[0] == 0.5 for divisor in divisors.found[1:])


def test_a_format_without_a_conversion_is_refused():
    form = BlockFormat("int8", 64)
    object.__setattr__(form, "name", "e5m2")
    with pytest.raises(ValueError, match="no conversion here"):
        dequantise(torch.zeros(80, dtype=torch.uint8), torch.zeros(64), form)
