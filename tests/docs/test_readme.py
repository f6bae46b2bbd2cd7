"""What the README shows can be run, and what it points to is there."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_in_twelve_lines_trains():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) == 12
    shown: dict[str, object] = {}
    torch.manual_seed(0)
    exec(code, shown)
    assert shown["step"] == 9
    assert list(shown["weights"]) == list(shown["model"].state_dict())


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_place_in_the_tree_is_there():
    (tree,) = re.findall(r"```\nsrc/zeroshard/\n(.*?)```", README, re.S)
    inside = re.findall(r"^  ([\w.]+/?)  ", tree, re.M)
    lines = [re.split(r"\s{3,}", line)[0] for line in tree.splitlines() if not line.startswith(" ")]
    outside = [name for line in [*lines, tree.splitlines()[-1]] for name in re.findall(r"(\w+)/", line)]
    assert len(inside) >= 10
    assert [n for n in inside if not (ROOT / "src/zeroshard" / n).exists()] == []
    assert [n for n in outside if not (ROOT / n).exists()] == []
