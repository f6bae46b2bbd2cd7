"""Public names that are loaded when they are first asked for, so that ``zeroshard --help`` need not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def loaded(module: str, name: str) -> Any:
    """``name`` of ``module``, for a package's ``__getattr__``.

    Raises:
        ImportError: an AttributeError ended the module's import. ``from package import name`` takes one for "there is
            no such name" and asks once more; torch's second import then fails over what the first has registered.
    """
    try:
        found = import_module(module)
    except AttributeError as error:
        raise ImportError(f"{module} cannot be imported: {error}") from error
    return getattr(found, name)
