"""What a GPU sustains: formulas, by equality; how they are fitted is the business of `test_published`."""

import pytest

from dry_run import this_machine
from zeroshard.lab.predict.hardware import DEVICES
from zeroshard.lab.predict.rates import (
    ATTENTION_HALF,
    K_START,
    SPREAD,
    SPREAD_UNCALIBRATED,
    SUSTAINED,
    WIDTHS,
    attention_share,
    product_s,
    spread,
    sustained_s,
)
from zeroshard.lab.predict.work import Work

A100 = DEVICES["a100-80gb"]


def _product(m: int, n: int, k: int, batch: int = 1) -> Work:
    return Work(2 * batch * m * n * k, 0, "bfloat16", shape=(batch, m, n, k))


def test_a_product_that_fills_its_waves_takes_its_tiles_and_the_start_of_each():
    # 8 x 16 tiles of 256 x 128 on 128 cores: one wave of tiles with k + K_START steps
    assert product_s(_product(2048, 2048, 4096), 1e12, 128) == pytest.approx(2 * 256 * 128 * (4096 + K_START) / 1e12)


def test_a_small_k_is_less_efficient_and_a_long_one_is_cut_into_parts():
    def rate(m, n, k):
        return 2 * m * n * k / product_s(_product(m, n, k), 1e12, 128)

    assert rate(8192, 8192, 64) < 0.5 * rate(8192, 8192, 8192)
    assert rate(512, 512, 65536) > 2 * 8 * 1e12  # 8 tiles of 256 x 128 alone would use 8 of 128 cores


@pytest.mark.parametrize("backward", [False, True])
def test_attention_reaches_half_its_rate_at_a_few_hundred_tokens_and_less_where_heads_are_narrow(backward):
    assert attention_share((1, ATTENTION_HALF, ATTENTION_HALF, 128), backward=backward) == 0.5
    wide, narrow = (attention_share((1, 10**9, 10**9, width), backward=backward) for width in (128, 64))
    assert (wide, narrow) == (pytest.approx(1.0), pytest.approx(WIDTHS[64][backward]))
    # a width of 80 is computed as 128
    assert attention_share((1, 10**9, 10**9, 80), backward=backward) == pytest.approx(80 / 128)


def test_attention_has_a_rate_by_kernel_and_direction():
    work = Work(10**12, 0, "bfloat16", attention=True, shape=(32, 10**9, 10**9, 128))
    peak = A100.matmul_flops_per_s["bfloat16"]
    for kernel, (forward, backward) in SUSTAINED["a100"].attention.items():
        assert sustained_s(work, A100, kernel) == (pytest.approx(10**12 / (peak * forward)), "flops")
        again = Work(10**12, 0, "bfloat16", attention=True, shape=work.shape, backward=True)
        assert sustained_s(again, A100, kernel)[0] == pytest.approx(10**12 / (peak * backward))


def test_an_operation_on_each_element_takes_its_bytes_and_a_small_one_its_start():
    seconds, limit = sustained_s(Work(0, 10**9, "bfloat16"), A100)
    assert (seconds, limit) == (pytest.approx(10**9 / (A100.bytes_per_s * SUSTAINED["a100"].memory)), "bytes")
    assert sustained_s(Work(0, 8, "bfloat16"), A100) == (A100.kernel_s, "kernels")


def test_a_time_is_as_sure_as_what_its_device_was_held_against():
    assert spread(A100) == SPREAD
    assert spread(DEVICES["mi300x-192gb"]) == SPREAD_UNCALIBRATED
    assert spread(this_machine(10**9, "cuda").device) == (1.0, 1.0)
