"""What README, the how-tos and public docstrings promise is in a list, beside the tests that hold it."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import zeroshard
import zeroshard.comm
import zeroshard.kernels
import zeroshard.lab
import zeroshard.models
import zeroshard.optim
from pages import ROOT

PROMISES = tomllib.loads(Path(__file__).with_name("promises.toml").read_text(encoding="utf-8"))["promise"]
WORDS = re.compile(r"equal to|the same bits|to the bit|\bnever\b|within seconds", re.IGNORECASE)
MODULES = (zeroshard, zeroshard.comm, zeroshard.kernels, zeroshard.lab, zeroshard.models, zeroshard.optim)


def _texts():
    """``(where, text)`` of README, each how-to without its code, and each public docstring, on one line each."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs/how-to").glob("*.md"))):
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        yield page.name, " ".join(prose.split())
    offered = [getattr(module, name) for module in MODULES for name in module.__all__]
    for public in offered:
        if not (inspect.isclass(public) or inspect.isfunction(public)) or not public.__module__.startswith("zeroshard"):
            continue
        members = vars(public).items() if inspect.isclass(public) else ()
        named = {f"{public.__name__}.{name}": member for name, member in members if name[0] != "_"}
        for name, member in {public.__name__: public, **named}.items():
            if callable(member) or isinstance(member, property):
                yield name, " ".join((inspect.getdoc(member) or "").split())


def _tests_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_promise_is_in_the_list_and_everything_in_the_list_is_promised():
    texts = dict(_texts())
    unheld = []
    for where, text in texts.items():
        held = [(text.find(row["says"]), row["says"]) for row in PROMISES]
        spans = [(begin - 100, begin + len(says) + 100) for begin, says in held if begin >= 0]
        unheld += [
            f"{where}: {text[max(0, found.start() - 60) : found.end() + 60]}"
            for found in WORDS.finditer(text)
            if not any(begin <= found.start() < end for begin, end in spans)
        ]
    assert unheld == [], "a promise needs a test that holds it, named in promises.toml"
    gone = [row["says"] for row in PROMISES if not any(row["says"] in text for text in texts.values())]
    assert gone == [], "no page says this any more"


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row["says"][:40])
def test_what_holds_a_promise_is_there(row):
    for name in row["held_by"]:
        path, _, test = name.partition("::")
        assert test in _tests_of(ROOT / path)
