"""What a configuration of nanoGPT assigns is what Python assigns, or it is refused; nothing is executed."""

from __future__ import annotations

import pytest

from zeroshard.errors import UserError
from zeroshard.interop.nanogpt import DEFAULTS, read_nanogpt
from zeroshard.interop.nanogpt_statements import Unknown, read_assignments

READ = [
    "batch_size: int = 4",
    "batch_size = 3\nbatch_size *= 4\nbatch_size -= 2",
    "gradient_accumulation_steps *= 4",
    "n_layer, n_head, n_embd = 2, 2, 32",
    "[n_layer, (n_head, n_embd)] = [2, (2, 32)]",
    "n_layer = n_head = 4",
    "if True:\n    dropout = 0.2\nelse:\n    dropout = 0.1",
    "if batch_size > 8 and not bias:\n    bias = True",
    "if dataset == 'openwebtext':\n    block_size = 64\nelif compile:\n    block_size = 32",
    "if __name__ == '__main__':\n    n_layer = 3",
    "for each in (1, 2, 3):\n    n_layer = each * 2",
    "for i in range(5):\n    if i == 3:\n        break\n    batch_size += i\nelse:\n    batch_size = 1",
    "for i in range(5):\n    if i % 2:\n        continue\n    batch_size += i\nelse:\n    n_layer = 7",
    "for n_layer in [2, 3]:\n    pass",
    "width = 64\nn_embd = width * 2\nn_head = n_embd // width",
    "out_dir = 'out-' + dataset\nwandb_run_name = f'{dataset}-{n_layer}'",
    "learning_rate = 2 ** -10\nmin_lr = -(-learning_rate) / 10",
    "batch_size = 8 if n_layer > 6 else 16",
    "batch_size = int('4') + len('abc') + min(3, 2) + sum([1, 2]) + abs(-1)",
    "sizes = {'small': (2, 32), 'large': (4, 64)}\nn_layer, n_embd = sizes['large']",
    "import time\nfrom math import sqrt\nn_layer = 5",
    "def helper(x):\n    n_layer = 9\n    return x\nn_embd = 64",
    "'a docstring'\nassert n_layer == 12\nprint('hello')\npass\nn_layer = 2",
    "a = b = 2\na += b\nn_layer = a",
    "x = [1, 2]\nn_layer = x[-1]",
    "decay_lr = not decay_lr\nbias = 1 < n_layer <= 12",
    "n_layer: int\nn_layer = 3",
    "global n_layer\nn_layer = 4",
    "while False:\n    pass\nn_layer = 4",
]


@pytest.mark.parametrize("text", READ)
def test_what_is_read_is_what_python_assigns(tmp_path, text):
    (tmp_path / "c.py").write_text(text)
    told = dict(DEFAULTS) | {"__name__": "__main__"}
    exec(text, told)
    found = read_assignments(tmp_path / "c.py", DEFAULTS, {})
    assert {**DEFAULTS, **found} == {key: told[key] for key in DEFAULTS} | found
    assert not any(isinstance(value, Unknown) for value in found.values())
    assert found.keys() <= DEFAULTS.keys()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import os\nif os.environ.get('X'):\n    batch_size = 4", r"line 2: it may set batch_size in a way"),
        ("while n_layer < 20:\n    n_layer += 1", r"line 1: it may set n_layer"),
        ("try:\n    n_layer = 2\nexcept Exception:\n    n_layer = 3", r"line 1: it may set n_layer"),
        ("with open('x') as n_layer:\n    pass", r"line 1: it may set n_layer"),
        ("from base import *", r"line 1: it may set all that it imports"),
        ("from base import n_layer", r"line 1: it may set n_layer"),
        ("import base as n_layer", r"line 1: it may set n_layer"),
        ("def f():\n    global n_layer\n    n_layer = 3\nf()", r"line 1: it may set n_layer"),
        ("class n_layer:\n    pass", r"line 1: it may set n_layer"),
        ("del n_layer", r"line 1: it may set n_layer"),
        ("globals()['n_layer'] = 3", r"line 1: it uses globals, which can set anything"),
        ("globals().update(n_layer=3)", r"line 1: it uses globals"),
        ("exec(open('base.py').read())", r"line 1: it uses exec"),
        ("x = eval('3')", r"line 1: it uses eval"),
        ("import sys\nsys.modules[__name__].n_layer = 3", r"line 2: it may set n_layer"),
        ("print(n_layer := 3)", r"line 1: it sets n_layer inside an expression"),
        ("n_layer, *n_head = 1, 2, 3", r"line 1: it may set n_head"),
        ("n_layer, n_head = 1, 2, 3", r"line 1: it assigns 3 values to 2 names"),
        ("for i in range(10 ** 9):\n    n_layer = i", r"line 1: it may set n_layer"),
        ("for i in range(9999):\n    for j in range(9999):\n        n_layer = j", r"loops take more than 10,000"),
        ("for line in open('x'):\n    n_layer = 1", r"line 1: it may set n_layer"),
        ("match n_layer:\n    case n_head:\n        pass", r"line 1: it may set n_head"),
        ("break", r"is no Python \(a break"),
        ("batchsize = 4", r"batchsize: nanoGPT has no such setting; did you mean batch_size"),
    ],
)
def test_what_may_set_a_setting_and_is_not_read_is_refused(tmp_path, text, line):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        read_nanogpt([str(tmp_path / "c.py")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "n_layer = int(os.environ['X'])",
        "n_layer = 2 ** 10 ** 9",
        "n_layer = round(5, -10 ** 9)",
        "out_dir = 'x' * 10 ** 9",
        "out_dir = b'x' * 10 ** 9",
        "out_dir = '%99999999d' % 1",
        "out_dir = f'{1:>99999999}'",
        "x = [1]\nx.append(2)\nn_layer = len(x)",
        "x = {'a': 1}\nx.update(a=2)\nn_layer = x['a']",
        "x = [1]\nx[0] = 2\nn_layer = x[0]",
        "x = 1\nfor x in open('y'):\n    pass\nn_layer = x",
        "def int(x):\n    return 7\nn_layer = int(1)",
        f"n_layer = {'(' * 90}1{')' * 90} + unknown",
    ],
)
def test_what_is_no_constant_is_told_and_takes_no_time(tmp_path, text):
    (tmp_path / "c.py").write_text(text)
    migration = read_nanogpt([str(tmp_path / "c.py")])
    (ignored,) = (row for row in migration.rows if row.key in ("n_layer", "out_dir") and row.fate == "ignored")
    assert "is no constant" in ignored.why
    assert any(ignored.key in line for line in migration.told())


@pytest.mark.parametrize("depth", [50, 400, 900, 3000])
@pytest.mark.parametrize("form", ["n_layer = {}3", "n_layer: int = {}3", "n_layer += {}3", "if {}3:\n    n_layer = 3"])
def test_however_deep_an_expression_is_nothing_is_dropped(tmp_path, form, depth):
    (tmp_path / "c.py").write_text(form.format("- " * depth))
    try:
        found = read_assignments(tmp_path / "c.py", DEFAULTS, {})
    except UserError:
        return
    assert isinstance(found["n_layer"], Unknown) or found["n_layer"] in (3, 15)


def test_what_comes_later_wins_as_in_nanogpt(tmp_path):
    (tmp_path / "a.py").write_text("batch_size = 4\n")
    (tmp_path / "b.py").write_text("batch_size *= 3\n")
    a, b = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    assert read_nanogpt([a, b]).values["micro_batch_size"] == 12
    assert read_nanogpt(["--batch_size=5", a]).values["micro_batch_size"] == 4
    assert read_nanogpt([a, "--batch_size=5", b]).values["micro_batch_size"] == 15


def test_nanogpts_model_has_the_exact_gelu():
    assert read_nanogpt([]).config().model.activation == "gelu"
