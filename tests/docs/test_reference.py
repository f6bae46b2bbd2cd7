"""docs/reference/ is what its program writes today, and holds every flag and key of every command."""

import importlib.util
import re

import pytest

from pages import ROOT
from zeroshard.cli import VERBS
from zeroshard.cli.flags import flags_of
from zeroshard.lab.bench.settings import BENCHES
from zeroshard.lab.sweep.cases import SweepConfig
from zeroshard.settings.validate import fields_by_name
from zeroshard.train.config.config import TrainConfig

FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


def test_the_pages_are_what_their_program_writes_today(made):
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert written == made, "run `python docs/reference.py`"


def test_a_page_has_each_flag_and_each_key_of_a_run(made):
    for dotted in fields_by_name(TrainConfig):
        table, dot, key = dotted.rpartition(".")
        section = made["train.md"].partition(f"## `[{table}]`" if dot else "## Keys outside")[2].partition("\n## ")[0]
        assert f"| `{key}` |" in section, dotted
    for flag in flags_of(TrainConfig):
        assert re.search(rf"`{re.escape(flag)}[` ]", made["train.md"]), flag


@pytest.mark.parametrize("name", [name for name in VERBS if name not in ("train", "prepare")])
def test_the_section_of_a_command_has_each_of_its_flags(made, name):
    verb = VERBS[name]
    flags = {word for word in verb.words if word.startswith("--")} | set(re.findall(r"--[a-z-]+", verb.usage))
    flags |= set(flags_of(verb.config, verb.positionals)) if verb.config else set()
    if name == "bench":
        flags |= {flag for kind in BENCHES.values() for flag in flags_of(kind)} | {"--json"}
    if name == "sweep":
        flags |= set(flags_of(SweepConfig)) - {"--base", "--axes"}
    section = made["commands.md"].partition(f"\n## zeroshard {name}\n")[2].partition("\n## ")[0]
    for flag in flags:
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w.-])", section), flag
