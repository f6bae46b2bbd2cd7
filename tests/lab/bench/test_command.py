import json

import pytest

from zeroshard.cli import main


def test_the_benches_are_listed(capsys):
    assert main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ("step", "device"))
    assert main(["bench", "device", "--help"]) == 0
    assert "--nproc" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("speed", "error: speed: there is no such bench"),
        ("step --round 2", "error: --round: there is no such flag; did you mean --rounds?"),
        ("step --nproc 1 --contestants ddp", "error: contestants: ddp needs several ranks; use plain, or --nproc 2"),
        ("step --contestants zero9", "error: contestants: 'zero9' is unknown"),
        ("step --json /proc/nowhere/x.json", "error: /proc/nowhere/x.json: cannot be written"),
        ("device --out /proc/nowhere/x.json", "error: /proc/nowhere/x.json: cannot be written"),
    ],
)
def test_nonsense_is_answered_in_a_line(capsys, words, line):
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(line)
    assert len(error.splitlines()) == 1


def test_a_bench_prints_and_writes(capsys, tmp_path):
    path = tmp_path / "new" / "m.json"
    words = f"step --nproc 1 --shapes tiny --contestants plain zero2 --rounds 1 --steps 1 --json {path}"
    assert main(["bench", *words.split()]) == 0
    assert "\ntiny   zero2" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert (content["what"], content["world"]) == ("step", 1)
    assert {"torch", "python", "processor", "cpus", "gpu"} <= content["environment"].keys()
