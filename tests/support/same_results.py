"""What a run of several ranks returned beside what one process did, and what a checkpoint holds."""

from typing import Any

import pytest
import torch

from zeroshard import checkpoint

TOLERANCE = 1e-4


def same(found: Any, expected: Any) -> None:
    """Assert that two structures of dicts, lists, tensors and numbers agree, floating-point ones within a tolerance."""
    assert type(found) is type(expected), found
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
    else:
        assert found == expected


def contents(path: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint, whole, by name and kind."""
    with checkpoint.CheckpointReader(*checkpoint.open_manifest(path)) as reader:
        return {
            (name, kind): reader.read(name, kind, (0, torch.Size(shape).numel())).view(shape)
            for name in reader.names()
            for kind, shape in reader.kinds(name).items()
        }
