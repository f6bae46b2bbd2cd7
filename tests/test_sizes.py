from math import inf

import pytest

from zeroshard.host.errors import UserError
from zeroshard.settings.sizes import bandwidth_in_words, duration_in_words, parse_bandwidth, parse_duration, parse_size


@pytest.mark.parametrize(
    ("parse", "meant"),
    [
        (parse_size, {"5GB": 5 * 10**9, "512MiB": 512 * 2**20, "1.5KB": 1500, "7 B": 7, " 3MB ": 3 * 10**6}),
        (parse_bandwidth, {"400Gbit/s": 50e9, "1.25GB/s": 1.25e9, "10 Mbit/s": 1.25e6, "8bit/s": 1.0, "1GiB/s": 2**30}),
        (parse_duration, {"5us": 5e-6, "1.5 ms": 1.5e-3, "0ns": 0.0, "2s": 2.0}),
    ],
)
def test_a_quantity_is_a_number_and_its_unit(parse, meant):
    assert {text: parse("x", text) for text in meant} == pytest.approx(meant)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_size, ["5", "GB", "5gb", "5Gbit", "-5GB", "5GB/s", "1e9B", "", "0.1B", "0MB"]),
        (parse_bandwidth, ["400", "400Gb/s", "400Gbit", "400gbit/s", "5GB", "-1GB/s", "0GB/s", "fast", "1Gibit/s"]),
        (parse_duration, ["5", "5min", "us", "-5us", "5us/s"]),
    ],
)
def test_a_quantity_without_a_clear_unit_is_refused_by_field(parse, texts):
    for text in texts:
        with pytest.raises(UserError, match=r"^network: "):
            parse("network", text)


def test_quantities_in_words_have_the_largest_unit_that_fits():
    bandwidths = {25e6: "200 Mbit/s", 50e9: "400 Gbit/s", 1.0: "8 bit/s", 124_875_000.0: "999 Mbit/s", inf: "unlimited"}
    assert {rate: bandwidth_in_words(rate) for rate in bandwidths} == bandwidths
    durations = {1e-3: "1 ms", 5e-6: "5 us", 0.0: "0 ns", 1.5: "1.5 s"}
    assert {seconds: duration_in_words(seconds) for seconds in durations} == durations
