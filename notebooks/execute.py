"""Run a notebook from its first cell to its last, and store what it shows: `python notebooks/execute.py NOTEBOOK`.

It runs in this interpreter's environment, whatever kernels Jupyter knows. What would change from run to run (times of
execution) is not stored.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

PYTHON = sys.executable  # of the kernel


class _HereManager(AsyncKernelManager):
    """A kernel of this interpreter, started without asking which are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """Of this interpreter."""
        argv = [PYTHON, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout_s: float = 120.0) -> nbformat.NotebookNode:
    """Run every cell in place and return the notebook.

    Args:
        notebook: its outputs are replaced.
        folder: where its cells run.
        timeout_s: for each cell.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        resources={"metadata": {"path": str(folder)}},
        kernel_manager_class=_HereManager,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata.pop("language_info", None)  # the patch version of this Python
    return notebook


def main() -> int:
    """Execute in place."""
    parser = argparse.ArgumentParser(description="Run a notebook and store its outputs.")
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    notebook = nbformat.read(path, as_version=4)
    nbformat.write(execute(notebook, path.parent), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
