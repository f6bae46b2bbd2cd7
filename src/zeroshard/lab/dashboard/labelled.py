"""Parts of pages that the keyboard reaches and a screen reader names."""

from __future__ import annotations

from typing import Any

from dash import html


def labelled(part: Any, role: str, title: str, **attributes: Any) -> html.Div:
    """``part`` in an element of that role and name."""
    return html.Div(part, role=role, **attributes, **{"aria-label": title})


def scrolling(part: Any, title: str) -> html.Div:
    """``part`` in a region that scrolls by itself; the keyboard reaches it."""
    return labelled(part, "region", title, className="scroll", tabIndex=0)


def control(title: str, dropdown: Any) -> html.Div:
    """A dropdown under its title. It names itself by its value alone, so the group around it has the title."""
    return labelled([html.Label(title, htmlFor=dropdown.id), dropdown], "group", title)
