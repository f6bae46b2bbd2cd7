from __future__ import annotations

import json

import pytest

from zeroshard.cli import main


def test_the_benches_are_listed(capsys):
    assert main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ("memory", "step", "collectives", "device", "kernels"))
    assert main(["bench", "device", "--help"]) == 0
    assert "--nproc" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("speed", "error: speed: there is no such bench"),
        ("memory --models gpt3", "error: model: "),
        ("memory --stages 4", "error: stages: there is no stage 4; choose of 0, 1, 2, 3"),
        ("memory --rank 2", "error: rank: 2 is outside a world of 2; ranks count from 0"),
        ("memory --ranks 2", "error: --ranks: there is no such flag; did you mean --rank?"),
        ("step --nproc 1 --contestants ddp", "error: contestants: ddp needs several ranks; use plain, or --nproc 2"),
        ("step --contestants zero9", "error: contestants: 'zero9' is unknown"),
        ("collectives --sizes 5", "error: sizes: "),
        ("collectives --worlds 1", "error: worlds: 1 ranks have nobody to talk to; give 2 or more"),
        ("kernels --operations norm", "error: operations: 'norm' is unknown"),
        ("memory --json /proc/nowhere/x.json", "error: /proc/nowhere/x.json: cannot be written"),
    ],
)
def test_nonsense_is_answered_in_a_line(capsys, words, line):
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert len(error.splitlines()) == 1


def test_a_bench_prints_and_writes(capsys, tmp_path):
    path = tmp_path / "new" / "m.json"
    assert main(["bench", *f"memory --models gpt2-demo --stages 1 --seq-len 16 --json {path}".split()]) == 0
    assert "3 of 3 points as predicted" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert (content["what"], content["world"]) == ("memory", 2)
    assert {"torch", "python", "processor", "cpus", "gpu"} <= content["environment"].keys()
