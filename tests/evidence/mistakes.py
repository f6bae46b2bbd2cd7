"""Mistakes drawn by a seed: one change of one function of the package, by its syntax tree.

A comparison is turned or shifted by one, a condition negated, a term or a statement dropped, two arguments swapped, a
constant changed, a ``clone`` or ``wait`` left out. Nothing is changed in messages, in what is evaluated once when a
module is imported, or in kernels, whose text Triton reads.

A mistake is made in a running process: functions get the changed code. So a test of it costs no import.
"""

import ast
import copy
import gc
import random
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from mutants.catalogue import PACKAGE, ROOT

TURNED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
TURNED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
LEFT_OUT = {"clone", "contiguous", "detach", "wait"}  # x.clone() becomes x
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "args", "msg"}  # of a function, an assertion
Changed = list[tuple[str, ast.AST]]
_functions: dict[str, list[FunctionType]] = defaultdict(list)


@dataclass
class Change:
    """What may be done at one place of a tree: ``child`` of ``parent`` becomes ``new``."""

    parent: ast.AST
    field: str
    place: int | None  # in a list
    child: ast.AST
    new: ast.AST
    operator: str

    @property
    def line(self) -> int:
        """Where ``child`` begins."""
        return self.child.lineno  # type: ignore[attr-defined]

    def apply(self) -> None:
        """Change the tree."""
        new = ast.fix_missing_locations(ast.copy_location(self.new, self.child))
        if self.place is None:
            setattr(self.parent, self.field, new)
        else:
            getattr(self.parent, self.field)[self.place] = new

    def __str__(self) -> str:
        old, new = (" ".join(ast.unparse(node).split())[:100] for node in (self.child, self.new))
        return f"{self.operator}: {old}" + ("" if self.operator == "statement dropped" else f" -> {new}")


@dataclass(frozen=True)
class Mistake:
    """The ``number``-th change of a file, below the package's folder."""

    file: str
    number: int

    @property
    def change(self) -> Change:
        """What it is."""
        return changes(ast.parse(_source(self.file)))[self.number]

    def make(self) -> bool:
        """Give this process the mistake; False where no function of it can have it."""
        source, path = _source(self.file), str(ROOT / PACKAGE / self.file)
        tree = ast.parse(source)
        changes(tree)[self.number].apply()
        before, after = (_codes(compile(code, path, "exec", dont_inherit=True)) for code in (source, tree))
        new = {key: code for key, code in after.items() if before.get(key) != code}
        import_file(self.file)
        live = (_functions or find_functions()).get(path, [])
        changed = [(each, new[_key(each.__code__)]) for each in live if _key(each.__code__) in new]
        if any(len(each.__code__.co_freevars) != len(code.co_freevars) for each, code in changed):
            return False
        for function, code in changed:
            function.__code__ = code
        return bool(changed)


def find_functions() -> dict[str, list[FunctionType]]:
    """By source, the functions that this process has; of a process that will fork, all of its forks have them."""
    gc.unfreeze()  # the collector names only what it watches
    for each in gc.get_objects():
        if type(each) is FunctionType:
            _functions[each.__code__.co_filename].append(each)
    gc.freeze()
    return _functions


def drawn(lines: Collection[tuple[str, int]], num: int, seed: int) -> list[Mistake]:
    """``num`` mistakes, or all where there are fewer, in proportion to these lines: (file, line)."""
    lines = set(lines)
    by_line: dict[tuple[str, int], list[Mistake]] = {}
    for file in {file for file, _ in lines}:
        for number, change in enumerate(changes(ast.parse(_source(file)))):
            if (file, change.line) in lines:
                by_line.setdefault((file, change.line), []).append(Mistake(file, number))
    order = random.Random(seed)
    return [order.choice(by_line[line]) for line in order.sample(sorted(by_line), min(num, len(by_line)))]


def changes(tree: ast.AST) -> list[Change]:
    """All changes of a module's functions, in the order of the tree."""
    found: list[Change] = []
    _find(tree, False, found)
    return found


def import_file(file: str) -> None:
    """Import a module of the package by its file."""
    if not file.endswith("__main__.py"):
        import_module(".".join(("zeroshard", *file.removesuffix(".py").removesuffix("/__init__").split("/"))))


@cache
def _source(file: str) -> str:
    return (ROOT / PACKAGE / file).read_text(encoding="utf-8")


def _find(parent: ast.AST, inside: bool, found: list[Change]) -> None:
    """``inside``: a function's body."""
    function = isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef))
    if function and any("jit" in ast.unparse(decorator) for decorator in parent.decorator_list):
        return
    for field, value in ast.iter_fields(parent):
        if field in SKIPPED_FIELDS and (function or field == "annotation" or isinstance(parent, ast.Assert)):
            continue
        for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST):
                continue
            if inside or (function and field == "body"):
                found += [Change(parent, field, place, child, new, name) for name, new in _changed(child, field)]
            if not isinstance(child, (ast.Raise, ast.JoinedStr)):  # their wording
                _find(child, inside or function, found)


def _changed(node: ast.AST, field: str) -> Changed:
    found: Changed = []
    if field in ("test", "ifs"):
        found.append(("negated", ast.UnaryOp(ast.Not(), node)))
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=comparators):
            kinds = [(name, table.get(type(operator))) for name, table in (("turned", TURNED), ("shifted", SHIFTED))]
            found += [(name, ast.Compare(left, [kind()], comparators)) for name, kind in kinds if kind]
        case ast.BinOp(left=left):
            found.append(("term dropped", left))
        case ast.BoolOp(op=operator, values=values):
            for place in range(len(values)):
                rest = values[:place] + values[place + 1 :]
                found.append(("term dropped", rest[0] if len(rest) == 1 else ast.BoolOp(operator, rest)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found.append(("negated", operand))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            found.append(("statement dropped", _never(node)))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            found.append(("statement dropped", _never(node)))
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if name in LEFT_OUT:
            found.append(("left out", value))
        case ast.Call(args=[first, second, *_]) if ast.dump(first) != ast.dump(second):
            if not any(isinstance(each, ast.Starred) for each in (first, second)):
                swapped = copy.copy(node)
                swapped.args = [second, first, *node.args[2:]]
                found.append(("arguments swapped", swapped))
        case ast.Constant(value=bool(value)):
            found.append(("constant", ast.Constant(not value)))
        case ast.Constant(value=int(value)) | ast.Constant(value=float(value)):
            found.append(("constant", ast.Constant(value + 1)))
    return found


def _never(statement: ast.stmt) -> ast.stmt:
    """In place of ``pass``: the function keeps its variables, `super`'s too, as its new code must."""
    return ast.If(ast.Constant(False), [statement], [])


def _codes(module: CodeType) -> dict[Any, CodeType]:
    return {_key(code): code for code in _nested(module)}


def _nested(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _nested(inner)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno
