"""What README and docs/ show works: code runs, commands are commands, links lead somewhere."""

import os
import re
import subprocess
from contextlib import nullcontext
from urllib.parse import unquote

import pytest
import torch

import forked
import page_ranks
from pages import BLOCKS, PAGES, ROOT, prints, python_of
from soak import soaking
from zeroshard.cli import VERBS
from zeroshard.cli.flags import flags_of, read_flags, take_option
from zeroshard.host.errors import UserError
from zeroshard.lab.bench.settings import BENCHES
from zeroshard.lab.sweep.cases import SweepConfig
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import merge
from zeroshard.train.config.toml import read_toml

SHELL = [block for block in BLOCKS if block.language in ("sh", "console", "bash")]
KNOWN = {"--help", "--version", "--config", *(word for verb in VERBS.values() for word in verb.words)}
CODE_COLUMNS = 75  # as many as a page shows on a screen of 1280 pixels
FLAGS_OF_OTHERS = {  # of hf download, pytest, torchrun and the benchmarks
    *("--local-dir", "--soak", "--shuffle", "--rehearse", "--rdzv-conf", "--chromium", "--local-addr", "--launcher"),
    *("--init-from", "--eval-only", "--list"),
}
FLAGS_OF_WORDS = {  # of verbs that have no class of settings
    *("--json", "--host", "--out", "--to"),
    *("--base.SETTING", "--axes.SETTING", "--base.max-steps", "--axes.strategy"),
}


# Their commands are those of tutorial.md, checkpoints.md and choose-a-stage.md with other numbers, and so are the plans
# on other pages than these.
WITH_SOAK = {"trainer.md", "gpus.md", "measure.md", "study.md"}
PLANS = {"tutorial.md", "choose-a-stage.md"}


ASKS = re.compile(r"\b(?:Zero|ShardedOptimizer|main)\(")  # for the ranks that a launcher has started
READ_ROWS = 2  # from this one on the page's libraries divide rows; tests/integrations compares those
OF_ONE_PROCESS = {"hugging-face.md"}  # its program exports, which one process does


def _by_name(blocks):
    return [pytest.param(block, id=block.name) for block in blocks]


def _pages_with(blocks):
    pages = dict.fromkeys(block.page for block in blocks)
    soak = {page: [pytest.mark.soak] if page.name in WITH_SOAK else [] for page in pages}
    return [pytest.param(page, id=str(page.relative_to(ROOT)), marks=soak[page]) for page in pages]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_code_is_as_narrow_as_the_column_of_a_page(page):
    fenced = re.findall(
        r"^ *```(?:sh|bash|python|toml|json)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M
    )
    wide = [line for code in fenced for line in code.splitlines() if len(line) > CODE_COLUMNS]
    assert wide == [] or page.name in ("log.md", "notebook.md")


@pytest.mark.parametrize("block", _by_name(SHELL))
def test_a_shell_block_says_whether_it_runs(block):
    assert block.mark.startswith(("run", "not run: ")), "say <!-- run --> or <!-- not run: why --> above the block"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", _pages_with(block for block in SHELL if block.mark.startswith("run")))
def test_the_shell_blocks_of_a_page_run_one_after_the_other(page, tmp_path):
    command = tmp_path / "bin" / "zeroshard"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {forked.PYTHON} -m zeroshard "$@"\n')
    command.chmod(0o755)
    forked.start_server()
    env = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for block in SHELL:
        a_plan = {words[0] for words in block.commands} == {"plan"} and page.name not in PLANS and not block.shown
        if block.page == page and block.mark.startswith("run") and (soaking() or not a_plan):
            code = f"set -eo pipefail\n{block.code}"
            words = ["bash", "-c", code]
            done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == block.status, f"{block.name}\n{done.stdout}{done.stderr}"
            assert not block.shown or prints(done.stdout, block.shown), f"{block.name}\n{done.stdout}"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_the_python_of_a_page_runs_and_trains_alike_under_torchrun(page, tmp_path, monkeypatch):
    under_torchrun = any(ASKS.search(block.code) for block in python_of(page)) and page.name not in OF_ONE_PROCESS
    ranks = page_ranks.start(page, tmp_path / "ranks") if under_torchrun else []
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    alone = page_ranks.trained(page)
    (first, *others) = page_ranks.ended(ranks) if ranks else (alone,)
    assert [num_ranks for num_ranks, _ in first] == [len(ranks) or 1] * len(alone)
    for place, (_, weights) in enumerate(first):
        for other in others:
            torch.testing.assert_close(other[place][1], weights, rtol=0, atol=0)
        if not (page.name == "transformers.md" and place >= READ_ROWS):
            torch.testing.assert_close(weights, alone[place][1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("block", _by_name(block for block in SHELL if block.commands))
def test_every_command_is_one(block):
    for words in block.commands:
        with pytest.raises(UserError) if block.status == 2 else nullcontext():
            _parse(words)


def _parse(words):
    """Refuse what the command line would, but for files that are not there."""
    if words[0].startswith("--"):
        assert words[0] in ("--help", "--version")
        return
    verb, rest = VERBS[words[0]], words[1:]
    if verb.before in rest:
        _parse(rest[rest.index(verb.before) :])
        rest = rest[: rest.index(verb.before)]
    if verb.config is None:
        assert not (rest and verb.words) or rest[0] in verb.words, words
        return
    path, rest = take_option(rest, "--config") if verb.reads_file else ("", rest)
    raw = read_toml(str(ROOT / path)) if path and (ROOT / path).exists() else {}
    if "--help" in rest:
        return
    given = read_flags(rest, flags_of(verb.config, verb.positionals), verb.positionals)
    validate(verb.config, merge(raw, given))


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_commands_and_flags_in_the_text_are_there(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    if page.name in ("conformance.md", "log.md"):  # reports: they name programs of their own day
        return
    known = KNOWN | FLAGS_OF_OTHERS | FLAGS_OF_WORDS
    for kind in (*BENCHES.values(), SweepConfig):
        known |= set(flags_of(kind))
    for verb in VERBS.values():
        known |= set(flags_of(verb.config, verb.positionals)) if verb.config else set()
    spans = [span for paragraph in re.split(r"\n\s*\n", text) for span in re.findall(r"`([^`]+)`", paragraph)]
    for code in spans:
        if code.startswith("zeroshard "):
            verb = code.split()[1]
            assert verb in VERBS or verb.startswith("--"), code
        if code.startswith(("zeroshard ", "--")):
            flags = re.findall(r"(?<!\S)(--[a-z][\w.-]*)", code)
            assert [flag for flag in flags if flag.replace("_", "-") not in known] == [], code


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_links_inside_the_project_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), link


def _anchors(page):
    """Of its headings, as the site makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
