"""The table of optimizers: what is measured, and how it reads."""

import pytest
import torch
from torch.optim import Optimizer

from zeroshard.errors import UserError
from zeroshard.lab.audit.optimizers import OptimizerRow, load_class, measure, table, torch_optimizers
from zeroshard.zero import OptimizerKind, Reach


class Plain(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(self.update(param), alpha=group["lr"])

    def update(self, param):
        return param.grad


class ByTensor(Plain):
    def update(self, param):
        return param.grad / param.grad.norm()


class Demanding(Plain):
    def __init__(self, params, rank):
        super().__init__(params)


TORCHS = [cls for cls in torch_optimizers() if cls.__name__ in ("AdamW", "Muon", "LBFGS", "SparseAdam")]


@pytest.mark.parametrize("cls", [*TORCHS, Plain, ByTensor], ids=lambda cls: cls.__name__)
def test_every_class_is_exact_at_each_stage_or_refused(cls):
    row = measure(cls)
    assert row.differences == ({} if row.kind.refused else dict.fromkeys(range(4), 0.0))
    assert row.kind.refused == (row.name in ("LBFGS", "SparseAdam"))


def test_a_class_that_needs_settings_is_no_traceback():
    row = measure(Demanding)
    assert row.name == f"{__name__}:Demanding"
    assert row.kind.reason.startswith("it cannot be built without settings: TypeError")
    Declared = type("Declared", (Demanding,), {"zero_reach": Reach.ELEMENT_WISE})
    assert measure(Declared).kind == row.kind


def test_a_wrong_declaration_is_measured_to_be_wrong():
    right = type("Right", (ByTensor,), {"zero_reach": Reach.PER_TENSOR})
    assert measure(right).differences == dict.fromkeys(range(4), 0.0)
    wrong = type("Wrong", (ByTensor,), {"zero_reach": Reach.ELEMENT_WISE})
    assert all(value > 1e-3 for value in measure(wrong).differences.values())


def test_the_table_says_exact_or_how_far_or_why_not():
    rows = [
        OptimizerRow("Good", OptimizerKind(Reach.ELEMENT_WISE, "it", (1, 2)), {0: 0.0, 1: 0.0, 2: 1.25e-7, 3: 0.0}),
        OptimizerRow("Tall", OptimizerKind(Reach.PER_TENSOR, "it", (2,)), dict.fromkeys(range(4), 0.0)),
        OptimizerRow("Bad", OptimizerKind(Reach.CROSS_TENSOR, "it looks at everything")),
    ]
    lines = table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[:4]]
    assert cells == [
        ["optimizer", "kind", "layout", "stage 0", "stage 1", "stage 2", "stage 3"],
        ["Good", "element-wise", "slices", "exact", "exact", "1.2e-07", "exact"],
        ["Tall", "per-tensor", "whole tensors, matrices only", "exact", "exact", "exact", "exact"],
        ["Bad", "refused", "cross-tensor", "it looks at everything"],
    ]
    assert "after 5 steps, on 2 and 3 ranks" in table(rows)


def test_a_class_is_found_by_its_name_in_the_current_folder_too(tmp_path, monkeypatch):
    assert load_class("torch.optim:Muon") is torch.optim.Muon
    (tmp_path / "my_own_optimizer.py").write_text("from torch.optim import SGD\nclass Mine(SGD): pass\n")
    (tmp_path / "my_broken_optimizer.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert load_class("my_own_optimizer:Mine").__name__ == "Mine"
    wrong = {
        "AdamW": "'AdamW' is not of the form module:Class",
        ":AdamW": "is not of the form",
        "nowhere.at.all:AdamW": "nowhere.at.all cannot be imported",
        "my_broken_optimizer:Mine": r"cannot be imported \(ZeroDivisionError: division by zero\)",
        "torch.optim:AdamX": "torch.optim has no optimizer class 'AdamX'",
        "torch.nn:Linear": "torch.nn has no optimizer class 'Linear'",
    }
    for spec, message in wrong.items():
        with pytest.raises(UserError, match=message):
            load_class(spec)


def test_measuring_leaves_the_number_of_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    measure(Plain)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
