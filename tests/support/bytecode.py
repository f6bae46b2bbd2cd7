"""Bytecode of the tests, made once.

In a fresh clone each worker would rewrite the assertions of every test file by itself, since all of them collect the
same files at the same time.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zeroshard.host.process import num_cpus


class _Compiled(Exception):
    """The first import of a module that is only compiled, and shall not run."""


def make(config: pytest.Config, folder: Path) -> None:
    """Have pytest rewrite and keep the test modules of ``folder`` that are not kept yet, a share on each processor."""
    loader = config.pluginmanager.rewrite_hook
    if not hasattr(loader, "exec_module") or sys.dont_write_bytecode:  # with --assert=plain nothing is rewritten
        return
    paths = sorted(folder.rglob("test_*.py"), key=lambda path: path.stat().st_size)
    first, *others = [paths[place :: num_cpus()] for place in range(num_cpus())]
    children = []
    for share in others:
        children.append(os.fork())
        if children[-1] == 0:
            try:
                _rewrite(loader, share)
            finally:
                os._exit(0)  # whoever collects the module is told what is wrong with it
    _rewrite(loader, first)
    for child in children:
        os.waitpid(child, 0)


def _rewrite(loader: Any, paths: list[Path]) -> None:
    for path in paths:
        module = ModuleType(path.stem)
        module.__spec__ = loader.find_spec(path.stem, [str(path.parent)])
        if module.__spec__ is None:  # python_files leaves it out
            continue
        vars(module)["__builtins__"] = {"__import__": _end_here}
        try:
            loader.exec_module(module)
        except (_Compiled, SyntaxError):
            continue


def _end_here(*_: object) -> None:
    raise _Compiled
