"""`zeroshard doctor --optimizers`: which classes may be sharded; whether the experiment agrees with a declaration."""

import re

import pytest
import torch
from torch.optim import Optimizer

from zeroshard import doctor
from zeroshard.cli import main
from zeroshard.zero import Reach

MINE = """
from torch.optim import SGD, Optimizer

class Plain(SGD):
    pass

class Demanding(Optimizer):
    def __init__(self, params, rank):
        super().__init__(params, {})
"""


class ByTensor(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


@pytest.fixture
def lines(capsys):
    """`lines(*specs)`: what is told of each class."""

    def told(*specs):
        assert main(["doctor", "--optimizers", *specs]) == 0
        return {line.split()[0]: re.split(r"  +", line)[1:] for line in capsys.readouterr().out.splitlines()}

    return told


def test_every_class_has_its_layout_or_is_refused(tmp_path, monkeypatch, lines):
    (tmp_path / "my_own_optimizers.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    found = lines("my_own_optimizers:Plain", "my_own_optimizers:Demanding")
    assert found["AdamW"][:2] == ["element-wise", "slices"]
    assert found["Muon"][:2] == ["per-tensor", "whole tensors, matrices only"]
    assert found["LBFGS"][:2] == ["closure-driven", "refused"]
    assert found["my_own_optimizers:Plain"][:2] == ["element-wise", "slices"]  # by the experiment
    assert found["my_own_optimizers:Demanding"][1] == "refused"
    assert found["my_own_optimizers:Demanding"][2].startswith("it cannot be built without settings: TypeError")
    declared = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, Optimizer)]
    assert len(found) == 1 + len(declared) - 1 + 2  # titles, all but the base class, and mine


@pytest.mark.parametrize(
    ("reach", "said"),
    [
        (Reach.PER_TENSOR, "it is declared per-tensor by its zero_reach; an experiment finds it per-tensor"),
        (Reach.ELEMENT_WISE, "it is declared element-wise .* finds it per-tensor: THE DECLARATION IS WRONG"),
    ],
)
def test_a_declaration_is_compared_with_the_experiment(monkeypatch, reach, said, lines):
    monkeypatch.setattr(doctor, "_load_class", lambda spec: type("Mine", (ByTensor,), {"zero_reach": reach}))
    assert re.fullmatch(said, lines("x:Mine")["x:Mine"][2])


def test_a_module_that_fails_is_named_in_a_line(tmp_path, monkeypatch, refusal):
    (tmp_path / "my_broken_optimizer.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    said = refusal("doctor", "--optimizers", "my_broken_optimizer:Mine")
    assert "my_broken_optimizer cannot be imported (ZeroDivisionError: division by zero); " in said
