"""What a browser may send: checked before any callback sees it, so that what fits no control is answered with 400."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dash import Dash
from flask import abort, request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

UPDATE = "/_dash-update-component"
_MOST_BYTES = 2**20
Plain = str | int | float | bool | None


class _Part(BaseModel):
    """A control's property, and what it is now."""

    model_config = ConfigDict(strict=True)

    id: str
    property: str
    value: Plain | list[Plain] | list[Any] | dict[str, Any] = None


class _Update(BaseModel):
    """What Dash's own script sends when a control has changed; other keys are Dash's affair."""

    model_config = ConfigDict(strict=True)

    output: str
    outputs: dict[str, Any] | list[dict[str, Any]]
    inputs: list[_Part]
    changedPropIds: list[str] = Field(default=[])
    state: list[_Part] = Field(default=[])


# What the values of our controls may be, where they are no choice of a list; `seen` is what the callback itself sent.
_FITS: dict[str, tuple[type, ...]] = {
    "clock": (int, type(None)),
    "chosen": (list, type(None)),
    "seen": (dict, type(None)),
    "one-run": (str, type(None)),
}


def refuser(app: Dash) -> Callable[[], None]:
    """What to call before each request: ends one whose body Dash or a callback of ``app`` would stumble over."""

    def refuse_what_fits_no_control() -> None:
        """End the request that is being answered, where it is no update that a page of ours sends."""
        if request.path != UPDATE or request.method != "POST":
            return
        if (request.content_length or 0) > _MOST_BYTES:
            abort(413)
        try:
            update = _Update.model_validate_json(request.get_data(cache=True))
        except (ValidationError, RecursionError):
            abort(400)
        known = app.callback_map.get(update.output)
        if known is None or update.outputs != _outputs(update.output):
            abort(400)
        for given, wanted in ((update.inputs, known["inputs"]), (update.state, known["state"])):
            if [(part.id, part.property) for part in given] != [(each["id"], each["property"]) for each in wanted]:
                abort(400)
        if not all(_fits(part) for part in (*update.inputs, *update.state)):
            abort(400)

    return refuse_what_fits_no_control


def _fits(part: _Part) -> bool:
    if part.id == "chosen" and isinstance(part.value, list):
        return all(isinstance(name, str) for name in part.value)
    return isinstance(part.value, _FITS.get(part.id, (str, int))) and not isinstance(part.value, bool)


def _outputs(spec: str) -> dict[str, str] | list[dict[str, str]]:
    """``..a.children...b.figure..``, or one without the dots, as Dash's script takes it apart."""
    found = [dict(zip(("id", "property"), each.rsplit(".", 1), strict=True)) for each in spec.strip(".").split("...")]
    return found if spec.startswith("..") else found[0]
