import pytest

from zeroshard.errors import UserError
from zeroshard.train.sizes import parse_size


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
