"""Metadata that follow from where the project lies: ``PROJECT_URL=https://HOST/OWNER/NAME python -m build``.

The wheel and the sdist then link to that repository, and the README that they carry shows its pictures and opens its
pages wherever it is read. Without an address they have no links, and the README is as it stands here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Addresses(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``, which pyproject.toml says are dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Raise ValueError if the address is not one of a browser."""
        home = os.environ.get("PROJECT_URL", "").rstrip("/")
        if home and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", home):
            raise ValueError(f"PROJECT_URL: {home} is no address; give https://HOST/OWNER/NAME, or leave it out")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_addresses(text, home)}
        if home:
            pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
            urls = {name: f"{home}/blob/HEAD/{path}" for name, path in pages.items()}
            metadata["urls"] = {"Homepage": home, "Repository": home, "Issues": f"{home}/issues", **urls}


def with_addresses(text: str, home: str) -> str:
    """Return Markdown whose pictures and links into the repository have its address ``home``; "": as it is."""
    if not home:
        return text
    picture = re.compile(r"(!\[[^]]*\]\()(?![a-z]+:)")
    link = re.compile(r"((?<!!)\[[^]]*\]\()(?![a-z]+:|#)")
    return link.sub(rf"\1{home}/blob/HEAD/", picture.sub(rf"\1{home}/raw/HEAD/", text))
