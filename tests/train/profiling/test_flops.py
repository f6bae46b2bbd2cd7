import pytest

from zeroshard.train.profiling.devices import device_by_driver_name
from zeroshard.train.profiling.flops import model_flops_utilisation, peak_bf16_flops_per_s


@pytest.mark.parametrize(
    ("reported", "memory_gib", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, 989.5e12),
        ("NVIDIA H100 PCIe", 79.1, 756.5e12),
        ("NVIDIA H200", 139.8, 989.5e12),
        ("NVIDIA H200 NVL", 139.8, 835.5e12),
        ("NVIDIA H20", 95.0, 148e12),
        ("NVIDIA A100-SXM4-40GB", 39.5, 312e12),
        ("NVIDIA A100-SXM4-80GB", 79.1, 312e12),
        ("NVIDIA A100 80GB PCIe", 79.1, 312e12),
        ("NVIDIA A800-SXM4-80GB", 79.1, 312e12),
        ("NVIDIA B200", 178.3, 2250e12),
        ("NVIDIA GB200", 184.3, 2500e12),
        ("NVIDIA B300 SXM6 AC", 267.6, 2250e12),
        ("NVIDIA L4", 21.9, 121e12),
        ("NVIDIA L40S", 44.4, 362.05e12),
        ("NVIDIA GeForce RTX 4090", 23.5, 165.2e12),
        ("NVIDIA GeForce RTX 5070 Ti", 15.5, 87.9e12),
        ("NVIDIA GeForce RTX 3060", 11.7, 25.5e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, 480e12),
        ("Tesla V100-SXM2-16GB", 15.7, None),
    ],
)
def test_a_known_device_is_found_by_its_reported_name(reported, memory_gib, peak):
    device = device_by_driver_name(reported)
    assert device is not None
    assert (device.name, device.memory_bytes) == (reported, round(memory_gib * 2**30))
    assert peak_bf16_flops_per_s(reported) == peak


def test_a_device_of_a_name_like_a_known_one_is_not_that_one():
    unknown = ("cpu", "", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100")
    near = (
        "NVIDIA GeForce RTX 4070 SUPER",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA H20-3e",
        "Tesla V100-PCIE-16GB",
    )
    for name in (*unknown, *near):
        assert device_by_driver_name(name) is None
        assert peak_bf16_flops_per_s(name) is None


def test_utilisation_divides_by_all_devices_and_is_absent_without_a_peak():
    assert model_flops_utilisation(1000.0, 6_000_000, 2, 10e9) == 0.3
    assert model_flops_utilisation(1000.0, 6_000_000, 2, None) is None
