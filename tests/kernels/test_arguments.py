"""A wrong argument of a kernel is named, by whichever backend serves it; and what is compiled stays one graph."""

import re
from functools import partial

import pytest
import torch

from exactness import assert_near, run
from zeroshard import kernels

ONE, ROW = torch.zeros(4), torch.zeros(2, 4)
TARGETS = torch.zeros(2, dtype=torch.int64)
HEADS = torch.zeros(1, 2, 3, 8)

# Each operation with arguments that are right; then what is wrong, and the beginning of what is said.
WRONG = {
    "layer_norm": (
        {"x": ROW, "weight": torch.ones(4), "bias": torch.ones(4)},
        [
            ({"x": ROW.long()}, "x: torch.int64 is not supported"),
            ({"x": torch.zeros(())}, "x: a scalar"),
            ({"x": torch.zeros(2, 65537)}, "x: width 65537 is outside 1..65536"),
            ({"x": torch.zeros(2, 0)}, "x: width 0 is outside"),
            ({"weight": torch.ones(5)}, "weight: shape (5,) is not [4]"),
            ({"weight": ONE.double()}, "weight: torch.float64 is neither"),
            ({"weight": ONE.to("meta")}, "weight: on meta"),
            ({"weight": None}, "bias: there is no weight"),
            ({"bias": ONE.half()}, "bias: torch.float16 is neither"),
            ({"residual": ONE}, "residual: shape (4,) is not x's"),
            ({"residual": ROW.half()}, "residual: torch.float16 is not x's"),
        ],
    ),
    "rope": (
        {"q": HEADS, "k": HEADS, "cos": torch.ones(3, 4), "sin": torch.zeros(3, 4)},
        [
            ({"q": HEADS.int()}, "q: torch.int32 is not supported"),
            ({"q": HEADS[0]}, "q: shape"),
            ({"q": HEADS[..., :7]}, "q: a head of width 7"),
            ({"k": torch.zeros(1, 2, 4, 8)}, "k: shape"),
            ({"k": HEADS.half()}, "k: torch.float16 is not q's"),
            ({"k": HEADS.to("meta")}, "k: on meta"),
            ({"cos": torch.zeros(3, 8)}, "cos: shape (3, 8) is not [3, 4]"),
            ({"sin": torch.zeros(3, 4).int()}, "sin: torch.int32 is not supported"),
            ({"sin": torch.zeros(3, 4, device="meta")}, "sin: on meta"),
        ],
    ),
    "swiglu": (
        {"gate": ROW, "up": ROW},
        [
            ({"gate": ROW.long()}, "gate: torch.int64 is not supported"),
            ({"gate": torch.zeros(())}, "gate: shape"),
            ({"up": ONE}, "up: shape (4,) is not gate's"),
            ({"up": ROW.half()}, "up: torch.float16 is not gate's"),
            ({"up": ROW.to("meta")}, "up: on meta"),
        ],
    ),
    "cross_entropy": (
        {"logits": ROW, "targets": TARGETS},
        [
            ({"logits": ROW.long()}, "logits: torch.int64 is not supported"),
            ({"logits": torch.zeros(2, 0)}, "logits: shape"),
            ({"logits": torch.zeros(())}, "logits: shape"),
            ({"targets": TARGETS.int()}, "targets: torch.int32 is not int64"),
            ({"targets": torch.zeros(3).long()}, "targets: shape (3,) is not (2,)"),
            ({"targets": TARGETS.to("meta")}, "targets: on meta"),
            ({"ignore_index": 0.5}, "ignore_index: 0.5"),
            ({"label_smoothing": 1.5}, "label_smoothing: 1.5"),
            ({"z_loss": -1.0}, "z_loss: -1.0"),
            ({"z_loss": float("nan")}, "z_loss: nan"),
            ({"reduction": "none"}, "reduction: 'none' is unknown"),
        ],
    ),
    "linear_cross_entropy": (
        {"hidden": ROW, "weight": torch.zeros(7, 4), "targets": TARGETS},
        [
            ({"hidden": ROW.int()}, "hidden: torch.int32 is not supported"),
            ({"hidden": torch.zeros(2, 0)}, "hidden: shape"),
            ({"weight": torch.zeros(7, 5)}, "weight: shape (7, 5) is not [vocab, 4]"),
            ({"weight": torch.zeros(7, 4).half()}, "weight: torch.float16 is not hidden's"),
            ({"weight": torch.zeros(7, 4, device="meta")}, "weight: on meta"),
            ({"targets": torch.zeros(3).long()}, "targets: shape (3,)"),
            ({"targets": TARGETS + 7}, "targets: 7 is outside 0..6"),
            ({"targets": TARGETS.to("meta")}, "targets: on meta"),
            ({"chunk_rows": 0}, "chunk_rows: 0 is below 1"),
            ({"reduction": "none"}, "reduction: 'none'"),
        ],
    ),
}


@pytest.mark.parametrize("operation", WRONG)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_wrong_argument_is_named(operation, backend):
    right, wrong = WRONG[operation]
    for given, message in wrong:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            getattr(kernels, operation)(**right | given, kernels=backend)


@pytest.mark.redundant
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("operation", ["cross_entropy", "linear_cross_entropy"])
def test_a_loss_is_compiled_without_a_break_in_the_graph(operation, compiler, random, device):
    """Norms, RoPE and SwiGLU are in the blocks that tests/models/test_kernels.py compiles."""
    loss = partial(getattr(kernels, operation), targets=torch.tensor([3, 0, 5], device=device), kernels="triton")
    inputs = [random(3, 12), random(33, 12)] if operation == "linear_cross_entropy" else [random(3, 33)]

    def model(first, *others):
        return loss(first.sin(), *others)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(run(compiled, inputs), run(model, inputs), strict=True):
        assert_near(got, wanted.double())
