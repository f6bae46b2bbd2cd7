"""Every block of the pages for those who come from elsewhere runs, and does what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import forked
from zeroshard.models import GPT2, GPT2Config

DOCS = Path(__file__).parents[1] / "docs"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}

# Every rank runs the blocks of a page one after the other, in one namespace.
DRIVER = """
import re, sys
from pathlib import Path
from zeroshard.host.launch.process_group import shutdown
shown = {}
for code in re.findall(r"```python\\n(.*?)```", Path(sys.argv[1]).read_text(), re.S):
    exec(code, shown)
assert abs(shown["before"] - shown["after"]) < 1e-6, (shown["before"], shown["after"])
del shown
shutdown()
"""


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("page", ["from-fsdp.md", "from-zero-redundancy-optimizer.md"])
def test_both_columns_train_alike(page, tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(tmp_path / "driver.py"), str(DOCS / page)]
    done = forked.run(command, env=ENV, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(blocks(page, "python")) == 3


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("from-*.md")))
def test_columns_are_twenty_lines_at_most(page):
    for language in ("python", "json", "sh"):
        assert all(len(block.splitlines()) <= 20 for block in blocks(page, language))


def run_commands(page, folder):
    """Every line of the page's shell blocks, in ``folder``."""
    forked.start_server()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for line in "".join(blocks(page, "sh")).replace("\\\n", "").splitlines():
        words = line.replace("zeroshard ", f"{forked.PYTHON} -m zeroshard ", 1)
        done = subprocess.run(
            words, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_the_commands_for_users_of_nanogpt_run(tmp_path):
    for folder in ("data/mine", "out"):
        (tmp_path / folder).mkdir(parents=True)
    (settings,) = blocks("from-nanogpt.md", "toml")
    (tmp_path / "mine.toml").write_text(settings)
    for name, count in (("train", 4000), ("val", 400)):
        (torch.arange(count) % 1000).to(torch.uint16).numpy().tofile(tmp_path / "data" / "mine" / f"{name}.bin")
    args = {"vocab_size": 50_304, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 4, "bias": True}
    with torch.device("cpu"):
        model: nn.Module = GPT2(GPT2Config(50_304, 8, 1, 1, 4))
    names = {name: name.replace("blocks.", "h.") for name in model.state_dict()}
    theirs = {
        name if name == "lm_head.weight" else f"transformer.{names[name]}": tensor
        for name, tensor in model.state_dict().items()
    }
    torch.save({"model": theirs, "model_args": args}, tmp_path / "out" / "ckpt.pt")
    run_commands("from-nanogpt.md", tmp_path)
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()
    assert (tmp_path / "runs" / "imported" / "config.toml").exists()


def test_the_commands_for_users_of_deepspeed_run(tmp_path):
    """`run_commands` asserts it."""
    (code,) = blocks("from-deepspeed.md", "json")
    (tmp_path / "ds_config.json").write_text(code)
    (tmp_path / "text.txt").write_text("abcd\n" * 2000)
    run_commands("from-deepspeed.md", tmp_path)
