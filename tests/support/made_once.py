"""What several tests read and takes seconds to make: one worker makes it, all of them read it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def folder_of_all(tmp_path_factory) -> Path:
    """The temporary folder of this run of the tests, in which each worker has its own."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def made_once(folder_of_all) -> Callable[[str, Callable[[Path], object]], Path]:
    """``made_once(name, make)``: the folder of that name, which ``make`` has filled; nobody may change it."""
    root = folder_of_all

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, made = root / f"once-{name}", root / f"once-{name}.made"
        with FileLock(root / f"once-{name}.lock"):
            if not made.exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                made.touch()
        return folder

    return get
