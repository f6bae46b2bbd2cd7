"""The loss of an evaluation by `ZeroTrainer` is that of one process, however rows and labels fall to ranks."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

import forked

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

SCRIPT = Path(__file__).with_name("evaluations.py")


@pytest.fixture(scope="module")
def results(made_once):
    def make(out):
        done = forked.run([sys.executable, SCRIPT, out], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr

    return pickle.loads((made_once("evaluations", make) / "losses.pickle").read_bytes())


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("count", [8, 7, 5, 3])
@pytest.mark.parametrize("model", ["gpt2", "own"])
def test_uneven_rows_have_the_loss_of_one_process(results, model, count, batch):
    plain, ranks = results
    loss, labels, rows = plain[model, count, batch]
    assert rows == count
    for rank in ranks:
        assert rank[model, count, batch] == (pytest.approx(loss, abs=1e-5), labels, count)
