"""What the runner makes of an answer, and that it leaves its copy as it was; `make mutants` runs it as a whole."""

from __future__ import annotations

import os

import pytest

from mutants import server
from mutants.__main__ import Copy, judged, main
from mutants.catalogue import Mutant, catalogue

MUTANT = Mutant("m", "f.py", "1", "2", ("tests/test_f.py",), "One is two.")


class Answering(Copy):
    """A copy of one file, and a server that answers without running anything."""

    def __init__(self, folder, answer):
        self.folder, self.answer, self.asked = folder, answer, []
        self.path = folder / MUTANT.path
        self.path.parent.mkdir(parents=True)
        self.path.write_text("one = 1\n")

    def pytest(self, tests, timeout_s, *args):
        self.asked.append((tests, self.path.read_text()))
        return self.answer


@pytest.mark.parametrize(
    ("status", "verdict"), [(1, "seen"), (0, "SURVIVED"), (None, "HUNG"), (2, "BROKEN"), (4, "BROKEN")]
)
def test_a_mutant_is_seen_by_a_test_that_fails_and_by_nothing_else(tmp_path, status, verdict):
    copy = Answering(tmp_path, {"status": status, "failed": {"t": 0.1}, "cpu_s": 0.5, "output": "no such test"})
    assert judged(copy, MUTANT, 9.0)[0] == verdict
    assert copy.asked == [(MUTANT.tests, "one = 2\n")]
    assert copy.path.read_text() == "one = 1\n"


def test_names_choose_mutants_whole_or_by_their_beginnings(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [m.name for m in catalogue()]
    assert main(["--list", "--only", "norm-*", "ring-barrier-skips-ranks"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "ring-barrier-skips-ranks" in names
    assert {name for name in names if name.startswith("norm-")} == set(names) - {"ring-barrier-skips-ranks"}
    with pytest.raises(SystemExit):
        main(["--only", "nothing-of-the-kind"])
    assert "no mutant is called nothing-of-the-kind" in capsys.readouterr().err


def test_triton_is_imported_for_interpreting_where_there_is_no_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = []
    monkeypatch.setattr(server.importlib, "import_module", lambda name: found.append(os.environ["TRITON_INTERPRET"]))
    server.preload(["torch._dynamo"])
    assert found == ["1"]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    server.preload(["torch._dynamo"])
    assert found == ["1", "0"]
