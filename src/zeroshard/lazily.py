"""Names that are loaded when they are first asked for, so that ``zeroshard --help`` need not import torch.

Two kinds: the public names of a package, and addresses, ``module:name``, as rows of our tables and users write them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from typing import Any

from zeroshard.errors import UserError

_ADDRESS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


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


def is_address(text: str) -> bool:
    """Whether ``text`` has the form ``module:name``; nothing is imported."""
    return _ADDRESS.fullmatch(text) is not None


def at_address(address: str | Callable[..., Any], field: str) -> Any:
    """What ``module:name`` names; modules in the current folder are found too, after all others.

    Args:
        address: as `is_address` knows it; what is no text is there already, and returned.
        field: the setting that an error is about.

    Raises:
        UserError: the module cannot be imported, or has no such name.
    """
    if not isinstance(address, str):
        return address
    module_name, _, name = address.partition(":")
    try:
        with _current_folder_last():
            module = import_module(module_name)
    except Exception as error:  # a module's code may raise anything
        what = f"{module_name} cannot be imported ({type(error).__name__}: {error})"
        raise UserError(field, what, "check the name, or install it in this environment") from error
    if not hasattr(module, name):
        raise UserError(field, f"{module_name} has no {name!r}", "write module:name")
    return getattr(module, name)


def made_at(address: str | Callable[..., Any], field: str, has: Sequence[str], /, *args: Any, **kwargs: Any) -> Any:
    """What the factory at ``address`` makes of the arguments.

    Args:
        address: as `at_address` takes it.
        field: the setting that an error is about.
        has: attributes of what it must make.

    Raises:
        UserError: `at_address`'s, it cannot be called so, or it makes something else.
    """
    factory = at_address(address, field)
    if not callable(factory):
        raise UserError(field, f"{address} is no class or function", "name one; see docs/how-to/extend.md")
    try:
        signature(factory).bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(type(value).__name__ for value in args), *kwargs]) or "no arguments"
        what = f"{address} cannot be called with {given} ({error})"
        raise UserError(field, what, "see docs/how-to/extend.md") from None
    except ValueError:  # what is written in C may have no signature
        pass
    made = factory(*args, **kwargs)
    if missing := [name for name in has if not hasattr(made, name)]:
        what = f"{address} has made a {type(made).__name__}, which has no {', '.join(missing)}"
        raise UserError(field, what, "see docs/how-to/extend.md")
    return made


@contextmanager
def _current_folder_last() -> Generator[None]:
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        for place in range(len(sys.path) - 1, -1, -1):  # the module may have changed the list meanwhile
            if sys.path[place] == folder:
                del sys.path[place]
                break
