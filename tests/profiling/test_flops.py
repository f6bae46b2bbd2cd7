import pytest

from zeroshard.profiling.flops import model_flops_utilisation, peak_bf16_flops_per_s


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
    ],
)
def test_the_peak_of_a_known_device_is_found_by_its_reported_name(name, peak):
    assert peak_bf16_flops_per_s(name) == peak


@pytest.mark.parametrize(
    "name",
    ["cpu", "", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100"],
)
def test_a_device_that_is_not_in_the_table_has_no_peak(name):
    assert peak_bf16_flops_per_s(name) is None


def test_utilisation_divides_by_all_devices_and_is_absent_without_a_peak():
    assert model_flops_utilisation(1000.0, 6_000_000, 2, 10e9) == 0.3
    assert model_flops_utilisation(1000.0, 6_000_000, 2, None) is None
