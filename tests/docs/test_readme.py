"""What the README shows can be run, and what it points to is there."""

import re
import sys
from pathlib import Path

import forked

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_in_twelve_lines_shards_under_torchrun(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) == 12
    (tmp_path / "loop.py").write_text(
        f"{code}\nassert list(weights) == [name for name, _ in model.named_parameters()]\n"
        "print(zero.comm.world_size, step, sum(each.double().sum().item() for each in weights.values()))\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = forked.run([*launcher, str(tmp_path / "loop.py")], capture_output=True, text=True, check=True, timeout=600)
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("2 9 ")


def test_a_stranger_reads_it_to_the_end():
    by_hand = re.sub(r"<!-- made by .*?<!-- end -->\n", "", README, flags=re.S)  # a table of measurements is looked up
    assert len(by_hand.splitlines()) <= 120


def test_every_folder_of_the_architecture_page_exists_and_none_is_missing():
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"## The folders\n.*?```\n(.*?)```", architecture, re.S)
    found: set[Path] = set()
    for line in listing.splitlines():
        inside = line.startswith("   ")
        folders = re.findall(r"([\w]+)/", re.split(r"\s{3,}", line.strip())[0])
        if not inside:
            top = ROOT / "src/zeroshard" / folders[0]
            found.add(top)
        else:
            found |= {top / folder for folder in folders}
    assert len(found) >= 20
    assert [path for path in found if not path.is_dir()] == []
    packages = {path.parent for path in (ROOT / "src/zeroshard").glob("*/*/__init__.py")}
    assert packages - found == set()
