"""The base of all settings' classes, and kinds of values: a field has its default, bounds and one sentence of help.

The command line, config.toml, the axes of sweeps and the pages of the reference are made from these fields.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from zeroshard.settings.sizes import parse_count

# `model = "NAME"` stands for `model.name = "NAME"`
SHORTHANDS = {"model": "name", "data": "source", "track": "to", "lora": "rank", "offload": "state", "base": "format"}
Count = Annotated[int, BeforeValidator(parse_count)]  # 1_000_000, or 1M


def _as_switch(raw: Any) -> Any:
    words = {**dict.fromkeys(("true", "yes", "1"), "on"), **dict.fromkeys(("false", "no", "0"), "off")}
    return words.get(str(raw).lower(), raw)


AutoSwitch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_switch)]  # true and false are on and off


def _as_fit(raw: Any) -> Any:
    words = raw.split(",") if isinstance(raw, str) else raw if isinstance(raw, list | tuple) else [raw]
    return ",".join(sorted(str(_as_switch(word)).strip() for word in words))


# whether a run is made to fit, and what may have fewer bits for it
Fit = Annotated[Literal["off", "on", "base", "states", "base,states"], BeforeValidator(_as_fit)]


def _as_text(raw: Any) -> Any:
    return str(raw) if isinstance(raw, int) and not isinstance(raw, bool) else raw


def _as_names(raw: Any) -> Any:
    return (raw,) if isinstance(raw, str) else raw


Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]  # a text is one of them

Tiles = Annotated[str, BeforeValidator(_as_text)]  # none, auto or a number
TILES = "Tiles of tokens in which a recomputed block's feed-forward layer runs: none, auto, or how many."


class OnResume(Enum):
    """What becomes of a setting that another value was given for when a run is resumed."""

    SAID = auto()  # in a line, as what is learned may change: of every setting that is not marked
    FREE = auto()  # nothing: it does not affect what is learned, or its effect is compared by itself
    FIXED = auto()  # it is refused


_T = TypeVar("_T")
Free = Annotated[_T, OnResume.FREE]
Fixed = Annotated[_T, OnResume.FIXED]


class Config(BaseModel):
    """Base class of all settings: unknown keys are refused, and an instance is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    shorthand: ClassVar[str] = ""  # the field that a text stands for which is given for the whole section

    @model_validator(mode="before")
    @classmethod
    def _from_shorthand(cls, raw: Any) -> Any:
        return {cls.shorthand: raw} if cls.shorthand and isinstance(raw, str) else raw

    def changed(self, *names: str) -> list[str]:
        """Those of the fields ``names``, of all if there are none, whose value is not the default."""
        fields = type(self).model_fields
        return [name for name in names or fields if getattr(self, name) != fields[name].default]

    def resolved(self, **values: Any) -> Self:
        """Return a copy with ``values`` that nobody gave, because this machine or other settings decide them."""
        copy = self.model_copy(update=values)
        copy.model_fields_set.difference_update(values)
        return copy

    @classmethod
    def on_resume(cls, name: str) -> OnResume:
        """What becomes of another value of the setting with this dotted name; a section's mark holds for its fields."""
        policy, section = OnResume.SAID, cls
        for word in name.split("."):
            field = section.model_fields.get(word)
            if field is None:
                break
            policy = next((each for each in field.metadata if isinstance(each, OnResume)), policy)
            section = field.annotation if isinstance(field.annotation, type) else Config
        return policy
