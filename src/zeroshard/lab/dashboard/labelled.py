"""Accessible page elements: the keyboard reaches them, and a screen reader announces their names."""

from __future__ import annotations

from typing import Any

from dash import html


def labelled(part: Any, role: str, title: str, **attributes: Any) -> html.Div:
    """Wrap ``part`` in an element with an ARIA role and label."""
    return html.Div(part, role=role, **attributes, **{"aria-label": title})


def scrolling(part: Any, title: str) -> html.Div:
    """Wrap ``part`` in a region that scrolls by itself and that the keyboard reaches."""
    return labelled(part, "region", title, className="scroll", tabIndex=0)


def control(title: str, dropdown: Any) -> html.Div:
    """A dropdown below its title. Dash's dropdown announces only its value, so the group around it has the title."""
    return labelled([html.Label(title, htmlFor=dropdown.id), dropdown], "group", title)
