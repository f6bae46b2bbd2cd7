from math import inf

import pytest

from zeroshard.errors import UserError
from zeroshard.train.config.sizes import (
    bandwidth_in_words,
    duration_in_words,
    parse_bandwidth,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("5GB", 5 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5KB", 1500),
        ("7 B", 7),
        ("2TiB", 2 * 2**40),
        (" 3MB ", 3 * 10**6),
    ],
)
def test_a_size_is_a_number_and_its_unit(text, num_bytes):
    assert parse_size("x", text) == num_bytes


@pytest.mark.parametrize("text", ["5", "GB", "5gb", "5Gbit", "-5GB", "5GB/s", "1e9B", "", "0.1B", "0MB"])
def test_anything_else_is_refused_by_field(text):
    with pytest.raises(UserError, match=r"^max_shard_size: "):
        parse_size("max_shard_size", text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("400Gbit/s", 50e9), ("1.25GB/s", 1.25e9), ("10 Mbit/s", 1.25e6), ("8bit/s", 1.0), ("1GiB/s", 2.0**30)],
)
def test_a_bandwidth_is_bits_or_bytes_a_second(text, bytes_per_s):
    assert parse_bandwidth("network", text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["400", "400Gb/s", "400Gbit", "400gbit/s", "5GB", "-1GB/s", "0GB/s", "fast", "1Gibit/s"]
)
def test_a_bandwidth_without_a_clear_unit_is_refused(text):
    with pytest.raises(UserError, match=r"^network: "):
        parse_bandwidth("network", text)


@pytest.mark.parametrize(("text", "seconds"), [("5us", 5e-6), ("1.5 ms", 1.5e-3), ("0ns", 0.0), ("2s", 2.0)])
def test_a_duration_is_a_number_and_its_unit(text, seconds):
    assert parse_duration("latency", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "5min", "us", "-5us", "5us/s"])
def test_a_duration_without_a_unit_is_refused(text):
    with pytest.raises(UserError, match=r"^latency: "):
        parse_duration("latency", text)


@pytest.mark.parametrize(
    ("bytes_per_s", "words"),
    [(25e6, "200 Mbit/s"), (50e9, "400 Gbit/s"), (1.0, "8 bit/s"), (124_875_000.0, "999 Mbit/s"), (inf, "unlimited")],
)
def test_a_bandwidth_in_words_has_the_unit_of_networks(bytes_per_s, words):
    assert bandwidth_in_words(bytes_per_s) == words


@pytest.mark.parametrize(("seconds", "words"), [(1e-3, "1 ms"), (5e-6, "5 us"), (0.0, "0 ns"), (1.5, "1.5 s")])
def test_a_duration_in_words_has_the_largest_unit_that_fits(seconds, words):
    assert duration_in_words(seconds) == words
