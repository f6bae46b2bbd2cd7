"""What the wheel and the sdist hold, and that nothing outside the core is needed where it should not be.

``.ci/clean-install`` goes on where these tests stop: it installs the wheel into an empty environment and trains there.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import zeroshard

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "zeroshard"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# where a distribution's name is not its module's
MODULES = {"nvidia-ml-py": "pynvml"}


def _build(source, kind, folder, **variables):
    """Build with the backend itself, in a process whose current folder is ``source``, as pip does."""
    env = {**os.environ, "PROJECT_URL": "", **variables}
    code = f"import hatchling.build, sys; print(hatchling.build.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, folder]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return Path(folder) / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return _build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from what the sdist holds, as an installer would."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return _build(next(unpacked.iterdir()), "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_its_types_and_its_licence_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    inside = {name for name in inside if "__pycache__" not in name}
    assert "zeroshard/py.typed" in inside
    meta = f"zeroshard-{zeroshard.__version__}.dist-info"
    assert names - inside == {
        f"{meta}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    } | {f"{meta}/licenses/src/zeroshard/lab/report/third_party/plotly.LICENSE.txt"}
    assert inside <= names


def test_the_wheel_says_what_it_needs_and_which_extras_there_are(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        facts = Parser().parsestr(archive.read(name).decode())
        (entry,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        assert "zeroshard = zeroshard.cli:main" in archive.read(entry).decode()
    assert facts["Requires-Python"] == ">=3.11"
    assert facts["License-Expression"] == "Apache-2.0 AND MIT"
    assert set(facts.get_all("Provides-Extra")) == set(EXTRAS)
    core = [line for line in facts.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(core) == len(PYPROJECT["project"]["dependencies"])


def test_distributions_of_a_project_with_an_address_link_to_it_and_show_its_pictures(tmp_path):
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        PACKAGE, tmp_path / "src" / "zeroshard", ignore=lambda *_: ["lab", "zero", "train", "models", "comm"]
    )
    wheel = _build(tmp_path, "wheel", tmp_path, PROJECT_URL="https://host.example/us/zeroshard/")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        facts = Parser().parsestr(archive.read(name).decode())
    home = "https://host.example/us/zeroshard"
    assert f"Documentation, {home}/blob/HEAD/docs/index.md" in facts.get_all("Project-URL")
    text = facts.get_payload()
    assert f"({home}/raw/HEAD/docs/figures/memory.svg)" in text
    assert f"]({home}/blob/HEAD/docs/how-to/own-loop.md)" in text
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []
    with pytest.raises(AssertionError, match="PROJECT_URL: mine is no address; give https"):
        _build(tmp_path, "wheel", tmp_path, PROJECT_URL="mine")


def test_every_extra_is_documented_and_no_other():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.M)) == set(EXTRAS)


def _imported(path):
    """Top-level modules that a file imports when it is run or called; those for a type checker alone are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def _modules(requirements):
    names = (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requirements)
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def test_what_the_package_imports_is_required_or_an_extra():
    user_extras = [lines for name, lines in EXTRAS.items() if name not in ("dev", "docs")]
    declared = _modules(PYPROJECT["project"]["dependencies"]) | set().union(*map(_modules, user_extras))
    declared |= (
        {"pydantic_core"} if "pydantic" in declared else set()
    )  # its errors are raised from there, says pydantic
    known = declared | set(sys.stdlib_module_names) | {"zeroshard"}
    strangers = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        for name in _imported(path)
        if name not in known
    }
    assert strangers == set()


def test_the_version_is_semantic_and_the_changelog_tells_of_it():
    assert re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?", zeroshard.__version__)
    assert re.search(rf"^## {re.escape(zeroshard.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
