import json

from zeroshard.cli import main


def test_the_benches_are_listed(capsys):
    assert main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ("step", "device"))
    assert main(["bench", "device", "--help"]) == 0
    assert "--nproc" in capsys.readouterr().out


def test_a_bench_prints_and_writes(capsys, tmp_path):
    path = tmp_path / "new" / "m.json"
    words = f"step --nproc 1 --shapes tiny --contestants plain zero2 --rounds 1 --steps 1 --json {path}"
    assert main(["bench", *words.split()]) == 0
    assert "\ntiny   zero2" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert (content["what"], content["world"]) == ("step", 1)
    assert {"torch", "python", "processor", "cpus", "gpu"} <= content["environment"].keys()
