"""What the shells complete, asked of the shells themselves where they are installed."""

import shutil
import subprocess

import pytest

from zeroshard.cli import VERBS, main
from zeroshard.cli.flags import flags_of
from zeroshard.cli.verbs.completion import SHELLS


@pytest.fixture
def written(capsys, tmp_path):
    """The script for a shell, as the command prints it."""

    def write(shell):
        assert main(["completion", shell]) == 0
        path = tmp_path / f"_zeroshard.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


def _run(shell, *args):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, *args], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def _bash(path, *words):
    """What bash offers for the last of ``words``, which follow `zeroshard`, in a folder with one file."""
    quoted = " ".join(f"'{word}'" for word in ("zeroshard", *words))
    folder = path.parent / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "FILE").touch()
    ask = f"cd {folder}; . {path}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _shtab_zeroshard"
    return _run("bash", "-c", f'{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"').split()


def test_bash_completes_commands_flags_and_values(written):
    path = written("bash")
    assert _bash(path, "") == list(VERBS)
    assert _bash(path, "ge") == ["generate"]
    assert _bash(path, "train", "--strat") == ["--strategy"]
    assert _bash(path, "train", "--strategy", "zero") == ["zero0", "zero1", "zero2", "zero3", "zero1-torch"]
    assert _bash(path, "train", "--out", "") == ["FILE"]
    assert _bash(path, "train", "--data.path", "one.txt", "") == ["FILE"]
    assert _bash(path, "train", "--max-steps", "") == []
    assert _bash(path, "completion", "z") == ["zsh"]
    assert _bash(path, "checkpoint", "show", "FI") == ["FILE"]
    assert _bash(path, "submit", "--no") == ["--nodes"]
    assert _bash(path, "submit", "--nodes", "2", "train", "--strat") == ["--strategy"]


def test_every_flag_is_known_to_every_shell(written):
    for shell in SHELLS:
        text = written(shell).read_text()
        for verb in VERBS.values():
            for flag in flags_of(verb.config, verb.positionals) if verb.config else ():
                assert (f"-l {flag[2:]} " if shell == "fish" else flag) in text
