"""Lazy imports, so that ``zeroshard --help`` does not import torch.

There are two kinds: the public names of a package, and addresses of the form ``module:name``, in our tables and in
users' settings.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from typing import Any

from zeroshard.host.errors import UserError

_ADDRESS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are imported on first use.

    The names are those that its ``__init__.py`` imports under ``if TYPE_CHECKING``, where editors and type checkers
    find them: ``from package.module import Name as Name``. So each name is written in one place.
    """
    with open(file, encoding="utf-8") as source:
        imports = [node for node in ast.walk(ast.parse(source.read())) if isinstance(node, ast.ImportFrom)]
    home = {name.name: str(node.module) for node in imports for name in node.names if name.asname == name.name}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return loaded(home[name], name)

    return load, lambda: sorted({*vars(sys.modules[package]), *home}), sorted(home)


def loaded(module: str, name: str) -> Any:
    """Import ``module`` and return its ``name``.

    Raises:
        ImportError: the module's import raised an AttributeError. ``from package import name`` would take that for "no
            such name" and try again; torch's second import would then fail because of what the first has registered.
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
    """Import the object at ``module:name``; modules in the current folder are found too, after all others.

    Args:
        address: text of the form ``module:name``; an object that is not text is returned as it is.
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
    """Call the factory at ``address`` with the arguments, and return the object that it makes.

    Args:
        address: as in `at_address`.
        field: the setting that an error is about.
        has: attributes that the made object must have.

    Raises:
        UserError: as `at_address`; the factory cannot be called with these arguments, or makes another kind of object.
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
    except ValueError:  # a callable written in C may have no signature
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
        for place in range(len(sys.path) - 1, -1, -1):  # the module may have changed the list during its import
            if sys.path[place] == folder:
                del sys.path[place]
                break
