"""Bytecode of the tests that is made before workers start."""

from __future__ import annotations

import sys

import bytecode


def test_each_test_module_is_compiled_once_and_none_runs(tmp_path, monkeypatch, pytestconfig):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(bytecode, "num_cpus", lambda: 2)
    source = '"""What it says."""\n\nimport os\n\nos.mkdir({!r})\n\n\ndef test_one():\n    assert 1 == 1\n'
    for name in ("a/test_one.py", "a/test_two.py", "b/test_one.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source.format(str(tmp_path / "ran")))
    (tmp_path / "b" / "test_broken.py").write_text("def test_one(:\n")

    def kept():
        return {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.pyc")}

    bytecode.make(pytestconfig, tmp_path)
    made = kept()
    assert sorted(file.name.partition(".")[0] for file in made) == ["test_one", "test_one", "test_two"]
    bytecode.make(pytestconfig, tmp_path)
    assert kept() == made
    assert not (tmp_path / "ran").exists()


def test_where_no_bytecode_is_kept_nothing_is_compiled(tmp_path, monkeypatch, pytestconfig):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "test_one.py").write_text("import os\n")
    bytecode.make(pytestconfig, tmp_path)
    assert not list(tmp_path.rglob("*.pyc"))
