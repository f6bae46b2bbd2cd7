"""The verb `zeroshard bench`: checks the settings, runs one bench, and prints and writes its report."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from zeroshard.errors import ExitStatus, UserError
from zeroshard.lab.bench.report import Report


def run_bench(kind: str, settings: Any, json_path: str = "") -> int:
    """Run the bench ``kind``, print its report and write the file; returns the exit status.

    Args:
        kind: a key of `zeroshard.lab.bench.settings.BENCHES`, and the name of its module.
        settings: an instance of the class there.
        json_path: the JSON file for all measurements and the environment; empty: none is written.

    Raises:
        UserError: a setting is invalid or not available on this machine, or a file cannot be written.
    """
    for path in map(Path, filter(None, (json_path, getattr(settings, "out", "")))):
        try:  # before minutes of measuring
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise UserError(str(path), f"cannot be written ({error.strerror})", "name another file") from None
    report: Report = import_module(f"zeroshard.lab.bench.{kind}").run(settings)
    print(report.text())
    if json_path:
        report.write(Path(json_path))
    return ExitStatus.OK
