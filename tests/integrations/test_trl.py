"""TRL's `SFTTrainer` and `DPOTrainer` with `ZeroTrainerMixin` on two ranks, held against them in one process."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import forked

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("trl", "transformers", "accelerate", "datasets")
]

SCRIPT = Path(__file__).with_name("trl_loops.py")


@pytest.fixture(scope="module")
def results(made_once):
    def make(out):
        done = forked.run([sys.executable, SCRIPT, out], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr

    return torch.load(made_once("trl", make) / "results.pt", weights_only=False)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_two_ranks_train_as_one_process(results, kind, stage):
    losses, norms, weights = results["plain"][kind]
    for rank in results["ranks"]:
        found = rank[kind, stage]
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        assert set(found[2]) == set(weights)
        for name, value in weights.items():
            torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-5)
