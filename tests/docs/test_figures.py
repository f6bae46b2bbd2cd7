"""The pictures of docs/ are what their program draws today, and show what the stage table says."""

import importlib.util
import re

import pytest

from pages import ROOT
from soak import soaking
from zeroshard.zero import STAGES
from zeroshard.zero.core.strategy import SHARD

FIGURES = ROOT / "docs" / "figures"
OF_PLANS = {"exposed", "long-context"}  # with --soak: each is made of two dozen traces


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw", FIGURES / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _marks(svg):
    """Words and filled shapes, without the numbers that another version of matplotlib may round otherwise."""
    text = svg.read_text(encoding="utf-8")
    return re.findall(r"<text[^>]*>([^<]*)</text>", text), re.findall(r"fill: (#\w+)", text)


def test_they_are_what_is_drawn_today(draw, tmp_path, monkeypatch):
    assert sorted(draw.PICTURES) == sorted(path.stem for path in FIGURES.glob("*.svg"))
    if not soaking():
        monkeypatch.setattr(draw, "PICTURES", {name: draw.PICTURES[name] for name in draw.PICTURES.keys() - OF_PLANS})
    for path in draw.write(tmp_path):
        assert _marks(path) == _marks(FIGURES / path.name), path.name


def test_the_picture_of_the_stages_shards_what_the_table_shards(draw):
    axes = draw.stages().axes
    for stage, row in STAGES.items():
        for rank in range(draw.NUM_RANKS):
            bars = axes[stage * draw.NUM_RANKS + rank].patches
            for column, bar in zip(draw.COLORS, bars[1::2], strict=True):
                expected = (rank, 1) if getattr(row, column) is SHARD else (0, draw.NUM_RANKS)
                assert (bar.get_x(), bar.get_width()) == expected
