"""Paths of modules that have moved: in this release the earlier ones still import, and are the same modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "zeroshard.errors": "zeroshard.host.errors",
    "zeroshard.inference": "zeroshard.train.inference",
    "zeroshard.interop": "zeroshard.integrations",
    "zeroshard.launch": "zeroshard.host.launch",
    "zeroshard.local_steps": "zeroshard.zero.local_steps",
    "zeroshard.named_shards": "zeroshard.optim.named_shards",
    "zeroshard.optimizer_classes": "zeroshard.optim.classes",
    "zeroshard.profiling": "zeroshard.train.profiling",
    "zeroshard.rules": "zeroshard.settings.rules",
    "zeroshard.sharded_optimizer": "zeroshard.zero.sharded_optimizer",
    "zeroshard.wire_formats": "zeroshard.settings.wire_formats",
}
"""Earlier path -> path now; what lies inside of a package has moved with it."""


class _Moved(MetaPathFinder, Loader):
    """Finds modules under their earlier paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an earlier path; None for every other."""
        return None if _path_now(fullname) is None else spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that has moved."""
        now = _path_now(spec.name)
        assert now is not None
        module = import_module(now)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import has replaced; it has run already."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _path_now(fullname: str) -> str | None:
    parts = fullname.split(".", 2)
    found = MOVED.get(".".join(parts[:2]))
    return found if found is None or len(parts) == 2 else f"{found}.{parts[2]}"


def keep_earlier_paths() -> None:
    """From now on modules import under their earlier paths too."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
