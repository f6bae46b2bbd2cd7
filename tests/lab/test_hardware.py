import json

import pytest

from zeroshard.host.errors import UserError
from zeroshard.lab.predict.hardware import (
    DEVICES,
    LINKS,
    Calibration,
    Device,
    Link,
    find_device,
    find_link,
    read_calibration,
    write_calibration,
)
from zeroshard.lab.predict.rates import SUSTAINED

MEASURED = Calibration(
    Device("this machine", 8 * 10**9, {"float32": 5e10}, 1e10, "zeroshard bench device"),
    Link("gloo", 3e-5, 2e9, "zeroshard bench device, 2 ranks", call_s=1e-4, share=1.0),
)


def test_every_row_is_positive_has_a_source_and_a_link_of_the_table():
    for device in DEVICES.values():
        assert device.source
        assert device.link in LINKS
        assert device.sustained in ("", *SUSTAINED)
        assert 0 < device.matmul_share <= 1.1  # GeForce boards have higher clocks than their data sheets say
        assert min(device.memory_bytes, device.bytes_per_s, *device.matmul_flops_per_s.values()) > 0
    for link in LINKS.values():
        assert link.source
        assert min(link.latency_s, link.bytes_per_s, link.call_s) > 0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100-80gb", "h100-80gb"),
        ("H200", "h200-141gb"),
        ("rtx_4090", "rtx-4090-24gb"),
        ("a6000", "rtx-a6000-48gb"),
        ("4090-24gb", "rtx-4090-24gb"),
        ("rtx-3090", "rtx-3090-24gb"),
        ("4060-ti", "rtx-4060-ti-16gb"),
        ("rtx-4060", "rtx-4060-8gb"),
        ("b300", "b300-270gb"),
        ("h20", "h20-96gb"),
        ("rtx-pro-6000", "rtx-pro-6000-96gb"),
        ("pro-6000-server", "rtx-pro-6000-server-96gb"),
        ("mi355x", "mi355x-288gb"),
    ],
)
def test_a_device_is_found_by_its_name(text, name):
    assert find_device(text) == Calibration(DEVICES[name])


def test_a_network_is_a_name_or_a_bandwidth():
    assert find_link("infiniband-ndr").bytes_per_s == find_link("400Gbit/s").bytes_per_s == 50e9


def test_what_was_measured_is_read_back(tmp_path):
    path = tmp_path / "device.json"
    write_calibration(path, MEASURED, environment={"torch": "2.13"})
    assert read_calibration(path) == find_device(str(path)) == MEASURED
    assert json.loads(path.read_text())["environment"] == {"torch": "2.13"}
    write_calibration(path, Calibration(MEASURED.device))
    assert read_calibration(path).link is None


@pytest.mark.parametrize("spoil", ["", "[]", "{}", '{"format": "zeroshard device 1"}'])
def test_a_file_that_is_something_else_is_refused(tmp_path, spoil):
    path = tmp_path / "device.json"
    path.write_text(spoil)
    with pytest.raises(UserError, match=r"^gpu: .*device.json .*zeroshard bench device"):
        read_calibration(path)


def test_a_rate_that_is_no_positive_number_is_refused(tmp_path):
    path = tmp_path / "device.json"
    write_calibration(path, MEASURED)
    content = json.loads(path.read_text())
    content["device"]["bytes_per_s"] = 0
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="not a positive number"):
        read_calibration(path)
