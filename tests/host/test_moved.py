"""Modules import under the paths that they had before they moved, and are the same modules."""

import json
import sys

import forked
from zeroshard.host.moved import MOVED

PROGRAM = """
import importlib, json, sys
from zeroshard.errors import UserError
from zeroshard.host import errors
import zeroshard.launch.environment
import zeroshard.host.launch.environment as now
from zeroshard.inference.generate import load_for_text
from zeroshard.train.inference import generate
assert UserError is errors.UserError and sys.modules["zeroshard.errors"] is errors
assert sys.modules["zeroshard.launch.environment"] is now and zeroshard.launch.environment is now
assert load_for_text is generate.load_for_text
assert errors.__spec__.name == errors.__name__ == "zeroshard.host.errors"
try:
    import zeroshard.launch.nothing
except ModuleNotFoundError as error:
    assert "zeroshard.host.launch.nothing" in str(error)
print(json.dumps({name: importlib.import_module(name).__name__ for name in json.loads(sys.argv[1])}))
"""


def test_earlier_paths_are_the_same_modules():
    words = [sys.executable, "-c", PROGRAM, json.dumps(list(MOVED))]
    ended = forked.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == MOVED
