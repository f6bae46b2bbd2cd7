import pytest
import torch

from zeroshard.zero import MixedPrecision


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_the_default_changes_no_dtype(dtype):
    assert MixedPrecision().compute_dtype(dtype) == MixedPrecision().gradient_dtype(dtype) == dtype


def test_compute_and_reduction_have_a_dtype_each():
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    assert policy.compute_dtype(torch.float32) == torch.bfloat16
    assert policy.gradient_dtype(torch.float32) == torch.float32
    assert policy.compute_dtype(torch.int64) == torch.int64
    assert MixedPrecision(reduce_dtype=torch.bfloat16).gradient_dtype(torch.float32) == torch.bfloat16


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype"])
def test_a_dtype_without_fractions_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}: torch.int8 is not a floating-point dtype"):
        MixedPrecision(**{field: torch.int8})
