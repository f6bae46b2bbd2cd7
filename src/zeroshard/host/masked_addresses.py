"""Addresses without their secrets: the form in which they are shown, logged and saved.

    https://user:password@host/x.jsonl?token=T&v=2    ->    https://***@host/x.jsonl?token=***&v=***

Which parameter is a secret cannot be told from its name (``sig``, ``X-Amz-Credential``), so all are masked. Only
`zeroshard.data.files` opens addresses as they were given; errors, settings that are saved and descriptions are masked
where they are made.
"""

from __future__ import annotations

import re

MASK = "***"
# An address in a text: up to a space, or to a quotation mark that ends it (an apostrophe may be part of a secret).
_ADDRESS = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]{0,30}://(?:[^\s"'<>]|'(?![]),:;\s]|$))+""")
_PARAMETER = re.compile(r"([?&#](?:[^=&#]*=)?)[^&#]+")


def masked(text: str) -> str:
    """Return ``text`` with the secrets of all addresses in it replaced by `MASK`; masked text stays as it is."""
    return _ADDRESS.sub(_masked_match, text) if "://" in text else text


def is_masked(address: str) -> bool:
    """Whether an address has lost its secrets, so that it cannot be opened."""
    return "://" in address and masked(address) == address and MASK in address


def _masked_match(found: re.Match[str]) -> str:
    address = found[0].rstrip(")],.:;")  # the sentence's
    return _masked_address(address) + found[0][len(address) :]


def _masked_address(address: str) -> str:
    scheme, _, rest = address.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in host:
        rest = f"{MASK}@{rest[host.rindex('@') + 1 :]}"
    elif re.search(r":(?!\d*$)", re.sub(r"^\[.*\]", "", host)) and "@" in rest:
        rest = f"{MASK}@{rest[rest.rindex('@') + 1 :]}"  # a password with one of /?#, which should have been escaped
    place = re.search(r"[?#]", rest)
    if place is not None:
        rest = rest[: place.start()] + _PARAMETER.sub(rf"\1{MASK}", rest[place.start() :])
    return f"{scheme}://{rest}"
