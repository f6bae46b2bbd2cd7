"""Check whether a folder already contains what is asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard.data.files import Fingerprint
from zeroshard.data.meta import META_NAME, DataMeta, read_meta
from zeroshard.errors import UserError


def is_prepared(wanted: Mapping[str, Any], fingerprint: Fingerprint, out: Path) -> bool:
    """Whether ``out`` contains these tokens already; raises UserError if it has other content.

    ``wanted``: the choices, as `spec.DataSpec.identity` returns them.
    """
    if not (out / META_NAME).exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = f"{out} exists and is not prepared data (no {META_NAME})"
            raise UserError("data.dir", what, "name another folder")
        return False
    meta = read_meta(out)
    changed = differences(without_rules(meta.spec), wanted)
    if not changed and meta.source.sha256 != fingerprint.sha256:
        changed = [
            f"another text: {meta.source.num_bytes:,} bytes of {meta.source.description}, sha256 "
            f"{meta.source.sha256[:12]}…, where the source now has {fingerprint.num_bytes:,} bytes, sha256 "
            f"{fingerprint.sha256[:12]}…"
        ]
    if changed:
        what = f"{out} was prepared with {', '.join(changed)}"
        raise UserError("data.dir", what, "name another folder or delete this one")
    return True


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return in words how the choices of two preparations differ."""
    return [
        f"{key} {found.get(key)!r} where {wanted.get(key)!r} is asked for"
        for key in sorted(wanted.keys() | found.keys())
        if wanted.get(key) != found.get(key)
    ]


def without_rules(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folder's choices without the rule by which it was split, which the user does not choose."""
    return {key: value for key, value in spec.items() if key != "split"}


def rule_of(meta: DataMeta) -> str:
    """Return the rule that split a folder's text (`Holdout.rule`); empty without text."""
    return meta.spec.get("split", "")


def warn(line: str) -> None:
    """Print a one-line warning on stderr."""
    print(f"warning: {line}", file=sys.stderr, flush=True)
