"""Validates what a browser sends before any callback sees it; a value that fits no control is answered with 400."""

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
    """A property of a control, and its current value."""

    model_config = ConfigDict(strict=True)

    id: str
    property: str
    value: Plain | list[Plain] | list[Any] | dict[str, Any] = None


class _Update(BaseModel):
    """The request that Dash's own script sends when a control has changed; its other keys are ignored here."""

    model_config = ConfigDict(strict=True)

    output: str
    outputs: dict[str, Any] | list[dict[str, Any]]
    inputs: list[_Part]
    changedPropIds: list[str] = Field(default=[])
    state: list[_Part] = Field(default=[])


# Types of the values of controls that are not dropdowns with a fixed list; ``seen`` has the marks that we sent.
_FITS: dict[str, tuple[type, ...]] = {
    "clock": (int, type(None)),
    "chosen": (list, type(None)),
    "seen": (dict, type(None)),
    "one-run": (str, type(None)),
}


def refuser(app: Dash) -> Callable[[], None]:
    """A function to call before each request: it rejects a body that Dash or a callback of ``app`` cannot handle."""

    def refuse_what_fits_no_control() -> None:
        """Abort the current request if it is an update that our pages would not send."""
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
    """Parse ``..a.children...b.figure..``, or a single output without the dots, as Dash's script does."""
    found = [dict(zip(("id", "property"), each.rsplit(".", 1), strict=True)) for each in spec.strip(".").split("...")]
    return found if spec.startswith("..") else found[0]
