"""Compares what a run of several ranks returned with what one process did."""

from typing import Any

import pytest
import torch

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
