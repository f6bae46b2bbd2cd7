"""nf4, and scales that are kept as codes: what bitsandbytes computes, and what the definitions say."""

import hashlib

import pytest
import torch

from kernels.test_block_formats import _there_and_back
from zeroshard.host.errors import UserError
from zeroshard.kernels import quantise
from zeroshard.kernels.block_formats import NF4
from zeroshard.kernels.scale_codes import tree_numbers
from zeroshard.settings.wire_formats import BlockFormat
from zeroshard.zero import MixedPrecision


def _weights(numel=64 * 300, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(numel, generator=generator).mul_(0.02)
    return weights.mul_(torch.rand(numel // 64, generator=generator).repeat_interleave(64) * 4).to(dtype)


def _codes(packed, numel, form):
    """The codes 0 to 15 of whole blocks, in the elements' order."""
    rows = packed[form.head_bytes(numel) :][: numel // 2].view(-1, form.block // 2)
    return torch.cat([rows & 15, rows >> 4], 1).view(-1)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_decoded_values_are_those_of_bitsandbytes(dtype, double):
    theirs = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weights, form = _weights(dtype=dtype), BlockFormat("nf4", 64, double)
    packed, back = _there_and_back(weights, form)
    options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": double}
    found, state = theirs.quantize_4bit(weights.view(-1, 64), **options)
    pairs = torch.stack([found.view(-1) >> 4, found.view(-1) & 15], 1)
    assert torch.equal(_codes(packed, len(weights), form), pairs.view(-1))
    head = packed[: form.head_bytes(len(weights))].view(torch.float32)
    if not double:
        assert torch.equal(head, state.absmax)
        assert torch.equal(back, theirs.dequantize_4bit(found, state).view(-1))
        return
    assert torch.equal(tree_numbers(torch.device("cpu")), theirs.create_dynamic_map())
    assert torch.equal(head, torch.cat([state.offset.view(1), state.state2.absmax]))
    ours = packed[form.head_bytes(len(weights)) + len(weights) // 2 :][: len(weights) // 64]
    # its function for CPUs gives one number of some hundred the neighbour's code, which is farther away
    assert (ours.int() - state.absmax.int()).abs().max() <= 1
    state.absmax = ours
    assert torch.equal(back, theirs.dequantize_4bit(found, state).view(-1))


def test_bytes_are_what_they_were_when_bitsandbytes_was_asked():
    """The codes and values that the test above has compared, where bitsandbytes is not installed."""
    packed, back = _there_and_back(_weights(), BlockFormat("nf4", 64))
    found = packed.numpy().tobytes() + back.numpy().tobytes()
    assert hashlib.blake2b(found, digest_size=8).hexdigest() == "235071b4823758ca"


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
def test_each_number_gets_the_nearest_code_and_numbers_of_the_format_stay(numel):
    weights, form, numbers = _weights(64 * 16)[:numel], BlockFormat("nf4", 64), torch.tensor(NF4)
    _, back = _there_and_back(weights, form)
    for values, found in zip(weights.split(64), back.split(64), strict=True):
        scale = values.abs().max()
        nearest = (values / scale - numbers[:, None]).abs().amin(0)
        assert torch.allclose((values - found).abs() / scale, nearest, rtol=0, atol=1e-6)
    assert torch.equal(_there_and_back(back, form)[1], back)
    halfway = (numbers[1:] + numbers[:-1]) / 2
    edges = torch.cat([halfway, torch.nextafter(halfway, torch.ones(())), torch.nextafter(halfway, -torch.ones(()))])
    around = torch.cat([edges, torch.ones(64 - len(edges))])
    expected = torch.cat([numbers[:-1], numbers[1:], numbers[:-1], torch.ones(64 - len(edges))])
    assert torch.equal(_there_and_back(around, form)[1], expected)


@pytest.mark.parametrize("name", ["nf4", "int4", "int8", "e4m3"])
@pytest.mark.parametrize("numel", [1, 100, 64 * 257])
def test_scales_kept_as_codes_are_off_by_a_part_of_their_spread_and_take_a_byte(name, numel, triton, device):
    weights = _weights(64 * 257)[:numel].to(device)
    plain, double = BlockFormat(name, 64), BlockFormat(name, 64, double=True)
    blocks = -(-numel // 64)
    saved = plain.num_bytes(numel) - double.num_bytes(numel)
    assert abs(saved - (3 * blocks - 4 - 4 * -(-blocks // 256))) < 16
    packed, back = _there_and_back(weights, plain)
    double_packed, double_back = _there_and_back(weights, double)
    codes = plain.code_bytes(numel)
    assert torch.equal(double_packed[double.head_bytes(numel) :][:codes], packed[plain.head_bytes(numel) :][:codes])
    scales = packed[: 4 * blocks].view(torch.float32)
    ratio = double_back / torch.where(back == 0, 1, back)
    allowed = (scales.max() - scales.min()) / 64 / scales.min() + 1e-6
    assert ((ratio - 1).abs()[back != 0] <= allowed).all()
    if numel == 100:
        got, got_back = _there_and_back(weights, double, kernels=triton)
        assert torch.equal(got, double_packed)
        assert torch.equal(got_back, double_back)


def test_nf4_is_no_wire_format_and_rounds_nothing_at_random():
    values, form = torch.zeros(64), BlockFormat("nf4", 64)
    with pytest.raises(ValueError, match=r"^key: nf4 rounds to the nearest code only; leave it out"):
        quantise(values, torch.zeros(form.num_bytes(64), dtype=torch.uint8), form, key=1)
    with pytest.raises(UserError, match=r"^gather: 'nf4' is not a wire format; choose .*, or int8, int4, e4m3$"):
        MixedPrecision(gather="nf4")
