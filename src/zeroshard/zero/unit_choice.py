"""Which modules become units: the forms of the argument ``units`` of `zeroshard.Zero`, from modules to ``"auto"``.

Which parameter belongs to which unit: `zeroshard.zero.core.units`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import nn

from zeroshard.host.errors import nearest_name
from zeroshard.zero.core.units import UnitSpec, partition

# Modules, or what names them: a class, a class's name, a path such as "transformer.h", or "auto".
UnitChoice = str | type[nn.Module] | nn.Module | Iterable[str | type[nn.Module] | nn.Module]
AUTO: Literal["auto"] = "auto"
MOST_NAMES = 12  # the most names that an error lists


def partition_of(model: nn.Module, units: UnitChoice | None) -> tuple[UnitSpec, list[UnitSpec]]:
    """Return the root unit and the others, in the order given; a module that is given twice is one unit.

    Raises:
        TypeError: ``units`` holds something that is neither a module nor names one.
        ValueError: a name that is no class and no path of the model; a unit that is no submodule of the model, or
            that is never called (`nn.ModuleList`).
    """
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    chosen = choose_units(model, units)
    for module in chosen:
        if module not in names:
            raise ValueError(f"units: a {type(module).__name__} is no submodule of the model; give its own submodules")
        if module is not model and is_container(module):
            raise ValueError(f"units: {names[module]!r} is a container that is never called; give its elements")
    root, *others = partition(model, chosen)
    return root, others


def choose_units(model: nn.Module, units: UnitChoice | None) -> list[nn.Module]:
    """Return the modules that ``units`` names, in the order in which they are given, else in the model's order.

    Args:
        model: the model whose submodules they are.
        units: None: the elements of the outermost `nn.ModuleList`s. ``"auto"``: `automatic_units`. A class, or the name
            of one: all modules of it. A path (``"transformer.h"``): the elements of the `nn.ModuleList` there, else
            the module itself. Several of these, or modules. One module: its elements if it has some, else itself.

    Raises:
        TypeError: ``units`` is, or holds, anything else.
        ValueError: a name that is no class of the model's modules and no path in it; the error lists what there is.
    """
    if units is None:
        return default_units(model)
    if isinstance(units, str) and units == AUTO:
        return automatic_units(model)
    if isinstance(units, (str, type)):
        return _meant(model, units)
    if isinstance(units, nn.Module):
        return list(units.children()) if isinstance(units, Iterable) else [units]
    if not isinstance(units, Iterable):
        raise TypeError(f"units: a {type(units).__name__}; give submodules, a class, its name, a path, or 'auto'")
    return [module for each in units for module in _meant(model, each)]


def default_units(model: nn.Module) -> list[nn.Module]:
    """Return the elements of each outermost `nn.ModuleList`, the repeated blocks of nearly every model; [] without one.

    An element that is never called itself, such as a list in a list, is replaced by its own elements.
    """
    found: list[nn.Module] = []

    def take(element: nn.Module) -> None:
        if not is_container(element):
            found.append(element)
            return
        for child in element.children():
            take(child)

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                take(child)
            else:
                walk(child)

    walk(model)
    return found


def automatic_units(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks, by the first of these rules that finds any.

    1. modules of the classes that `transformers` never splits over devices (``_no_split_modules`` of the model);
    2. the elements of the `nn.ModuleList` with the most parameters, among those whose elements have one class;
    3. `default_units`;
    4. as 2., of an `nn.Sequential` with several elements, which may be the model itself.
    """
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    blocks = [module for module in model.modules() if type(module).__name__ in named and module is not model]
    if blocks:
        return _outermost(blocks)
    lists = _largest_of_one_class(model, nn.ModuleList, at_least=1)
    return lists or default_units(model) or _largest_of_one_class(model, nn.Sequential, at_least=2)


def _largest_of_one_class(
    model: nn.Module, kind: type[nn.ModuleList | nn.Sequential], *, at_least: int
) -> list[nn.Module]:
    """Return the elements, of one class and ``at_least`` so many, of the container with most parameters; else []."""
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, kind)
        and len(module) >= at_least
        and len({type(each) for each in module}) == 1
        and not is_container(module[0])
    ]
    return max(lists, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters()), default=[])


def describe_units(model: nn.Module, chosen: list[nn.Module]) -> str:
    """Describe the chosen units: ``32 units: LlamaDecoderLayer, model.layers.0 ... model.layers.31``."""
    names = {module: name for name, module in model.named_modules()}
    distinct = list(dict.fromkeys(chosen))
    if not distinct:
        return "no units: all parameters are gathered together"
    classes = ", ".join(dict.fromkeys(type(module).__name__ for module in distinct))
    first, last = names[distinct[0]], names[distinct[-1]]
    if len(distinct) == 1:
        return f"1 unit: {classes}, {first}"
    return f"{len(distinct)} units: {classes}, {first} ... {last}"


def is_container(module: nn.Module) -> bool:
    """Whether the module has no forward: its children are called, it never is."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _meant(model: nn.Module, each: object) -> list[nn.Module]:
    if isinstance(each, nn.Module):
        return [each]
    if isinstance(each, str):
        of_class = [module for module in model.modules() if type(module).__name__ == each and module is not model]
        return of_class or _at(model, each)
    if isinstance(each, type) and issubclass(each, nn.Module):
        of_class = [module for module in model.modules() if isinstance(module, each) and module is not model]
        if not of_class:
            raise ValueError(f"units: no part of the model is a {each.__name__}; its classes are {_classes(model)}")
        return of_class
    name = each.__name__ if isinstance(each, type) else type(each).__name__
    raise TypeError(f"units: {name} is not an nn.Module; give submodules of the model, a class, its name, or a path")


def _at(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the module at a path as [module]; if it is a container such as `nn.ModuleList`, its elements."""
    there, came_to = model, ""
    for part in path.split("."):
        children = dict(there.named_children())
        if part not in children:
            raise ValueError(_no_such(model, path, came_to, children))
        there, came_to = children[part], f"{came_to}.{part}" if came_to else part
    return list(there.children()) if is_container(there) else [there]


def _no_such(model: nn.Module, path: str, came_to: str, children: dict[str, nn.Module]) -> str:
    inside = _some(children) or "nothing"
    if came_to:
        return f"units: the path {path!r} leads to {came_to!r} and no further; {came_to!r} has {inside}"
    close = nearest_name(path, [*{type(module).__name__ for module in model.modules()}, *children], cutoff=0.6)
    meant = "" if close is None else f" did you mean {close}?"
    return (
        f"units: {path!r} is neither a class of the model's modules ({_classes(model)}) nor a path in it ({inside});"
        f"{meant or ' name one of these'}"
    )


def _classes(model: nn.Module) -> str:
    return _some(dict.fromkeys(type(module).__name__ for module in model.modules() if module is not model))


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:MOST_NAMES]) + (
        f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    )


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that lie in no other one of them."""
    inner = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if module not in inner]
