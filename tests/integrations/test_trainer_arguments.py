"""Arguments and callbacks that people give `transformers.Trainer`, at stages 1 and 3, beside the stock Trainer."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import forked
from same_results import same
from soak import soaking

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("transformers", "accelerate", "peft")
]

SCRIPT = Path(__file__).with_name("trainer_arguments.py")
ALWAYS = {"modules_to_save": 3, "modules_to_save_best": 1, "prompt_tuning_best": 3}  # at a stage each
ALWAYS |= {"coded_base": 3, "uneven_rows": 3, "uneven_rows_of_means_with_a_number": 1, "uneven_rows_generated": 1}
ON_REQUEST = ["lora_resumed", "only_model_resumed"]
ON_REQUEST += ["uneven_rows_of_means", "uneven_rows_by_length", "uneven_rows_dropped"]


@pytest.fixture(scope="module")
def results(made_once):
    def make(out):
        words = [
            sys.executable,
            SCRIPT,
            out,
            *([] if soaking() else [f"{stage}-{name}" for name, stage in ALWAYS.items()]),
        ]
        done = forked.run(words, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stderr

    return torch.load(made_once("trainer-arguments", make) / "results.pt", weights_only=False)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=[] if ALWAYS.get(name) == stage else [pytest.mark.soak])
        for name in [*ALWAYS, *ON_REQUEST]
        for stage in (1, 3)
    ],
)
def test_the_trainer_does_what_it_does_in_one_process(results, name, stage):
    expected = results["plain"][name]
    assert not isinstance(expected, str), expected
    for rank in results[stage]:
        same(rank[name], expected)


def test_the_best_is_not_the_last(results):
    """Else it would not be seen whether it was loaded."""
    assert results["plain"]["modules_to_save_best"]["best"] != "checkpoint-4"
