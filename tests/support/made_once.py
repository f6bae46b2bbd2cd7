"""What several tests read and takes seconds to make: one worker makes it, all of them read it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """``made_once(name, make)``: the folder of that name, which ``make`` has filled; nobody may change it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the workers' own folders lie side by side

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, made = root / f"once-{name}", root / f"once-{name}.made"
        with FileLock(root / f"once-{name}.lock"):
            if not made.exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                made.touch()
        return folder

    return get
