"""Reads the settings that a Python file of nanoGPT assigns, without executing it.

nanoGPT executes its configuration files in the namespace of ``train.py``. We interpret their syntax tree instead:

    x = 4    x: int = 4    x *= 4    a, b = 1, 2    a = b = 1    if ...: x = 4    for x in ...: ...
    values: literals, names, arithmetic, comparisons, `a if b else c`, f-strings, int(), min(), range() and the like

No value is computed by anything but this module. An expression of another kind has no known value (`Unknown`). A
statement of another kind that may assign a setting is refused, because the setting's value would be a guess.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroshard.errors import UserError
from zeroshard.regular_files import read_text
from zeroshard.train.config.sizes import LARGEST

_TODO = "give one of nanoGPT's config files"
_MOST_ITEMS = 10_000  # characters or items of a value, and rounds of all loops together
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
_COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (abs, bool, float, int, len, list, max, min, range, round, str, sum, tuple)
}
# Functions with which a file can assign names that it does not spell.
_REACHING = frozenset({"__builtins__", "__import__", "delattr", "eval", "exec", "globals", "locals", "setattr", "vars"})


class Unknown:
    """Placeholder for the value of an expression that is not evaluated, with its line and source text."""

    def __init__(self, line: int, source: str) -> None:
        self.line, self.source = line, source


class _UnreadError(Exception):
    """An expression has no value that is known here."""


class _LeaveLoop(Exception):
    """A ``break`` was reached, or with ``again`` a ``continue``."""

    def __init__(self, again: bool) -> None:
        self.again = again


def read_assignments(path: Path, settings: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the file at ``path`` assigns, and other constants that it assigns and does not use.

    Args:
        path: path of the file.
        settings: all settings, with their defaults.
        before: settings that were given before the file is read.

    Raises:
        UserError: the file cannot be read, is no Python, or has a statement that may assign a setting and is not read.
    """
    try:
        text = read_text(path)
        tree = ast.parse(text)
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", _TODO) from None
    except (SyntaxError, ValueError) as error:
        raise UserError(str(path), f"is no Python ({error})", _TODO) from None
    except (RecursionError, MemoryError):  # the parser raises MemoryError at its own limit
        raise UserError(str(path), "is nested too deeply", _TODO) from None
    reader = _Reader(path, text, settings, before)
    try:
        reader.run(tree.body)
    except _LeaveLoop:
        raise UserError(str(path), "is no Python (a break or continue outside a loop)", _TODO) from None
    return {
        name: value
        for name, value in reader.assigned.items()
        if name in settings or not (name in reader.used or isinstance(value, Unknown))
    }


class _Reader:
    """The namespace of a file while its statements are interpreted, one after the other."""

    def __init__(self, path: Path, text: str, settings: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        self._path, self._text, self._settings = path, text, settings
        self._names = {"__name__": "__main__", **settings, **before}
        self.assigned: dict[str, Any] = {}
        self.used: set[str] = set()
        self._rounds = 0

    def run(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            try:
                self._run(statement)
            except RecursionError:
                is_assignment = isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign)
                self._forget(statement, settings=is_assignment)

    def _run(self, statement: ast.stmt) -> None:
        match statement:
            case ast.If() | ast.For():
                parts: list[ast.AST] = [statement.test if isinstance(statement, ast.If) else statement.iter]
            case _:
                parts = [statement]
        self._require_spelled(parts, statement)
        match statement:
            case ast.Assign():
                value = self._value_or_unknown(statement.value)
                for target in statement.targets:
                    self._assign(target, value, statement)
            case ast.AnnAssign():
                if statement.value is not None:
                    self._assign(statement.target, self._value_or_unknown(statement.value), statement)
            case ast.AugAssign(target=ast.Name(id=name)):
                both = ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value)
                self._assign(statement.target, self._value_or_unknown(ast.copy_location(both, statement)), statement)
            case ast.If():
                test = self._value_or_unknown(statement.test)
                if isinstance(test, Unknown):
                    self._forget(statement)
                else:
                    self.run(statement.body if test else statement.orelse)
            case ast.For():
                self._loop(statement)
            case ast.Break() | ast.Continue():
                raise _LeaveLoop(again=isinstance(statement, ast.Continue))
            case ast.Expr() | ast.Pass() | ast.Assert() | ast.Global():
                pass
            case _:
                self._forget(statement)

    def _loop(self, statement: ast.For) -> None:
        items = self._value_or_unknown(statement.iter)
        if not isinstance(items, list | tuple | range | str):
            self._forget(statement)
            return
        self.used.update(name for name in _bound_in(statement.target) if name not in self._settings)
        for item in items:
            self._rounds += 1
            if self._rounds > _MOST_ITEMS:
                raise self._refusal(statement, f"its loops take more than {_MOST_ITEMS:,} rounds")
            self._assign(statement.target, item, statement)
            try:
                self.run(statement.body)
            except _LeaveLoop as left:
                if not left.again:
                    return
        self.run(statement.orelse)

    def _assign(self, target: ast.expr, value: Any, statement: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = self.assigned[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List) and not any(isinstance(t, ast.Starred) for t in target.elts):
            values = list(value) if isinstance(value, list | tuple | str) else [value] * len(target.elts)
            if len(values) != len(target.elts):
                raise self._refusal(statement, f"it assigns {len(values)} values to {len(target.elts)} names")
            for each, part in zip(target.elts, values, strict=True):
                self._assign(each, part, statement)
        else:
            self._forget(statement)

    def _forget(self, statement: ast.stmt, *, settings: bool = False) -> None:
        """Make the values of all names that a statement may assign unknown; refuse it if one is a setting.

        With ``settings``, the values of settings become unknown too.
        """
        for name in sorted(set(_bound_in(statement))):
            if name == "*" or (name in self._settings and not settings):
                what = "all that it imports" if name == "*" else name
                raise self._refusal(statement, f"it may set {what} in a way that is not read")
            self._names[name] = self.assigned[name] = Unknown(statement.lineno, "...")

    def _require_spelled(self, parts: Sequence[ast.AST], statement: ast.stmt) -> None:
        """Note the names that expressions read, and refuse expressions that assign a setting, or any name.

        Lists and dictionaries that a call may change are unknown from then on.
        """
        for node in (node for part in parts for node in ast.walk(part)):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    self.used.add(name)
                    if name in _REACHING and name not in self.assigned:
                        raise self._refusal(statement, f"it uses {name}, which can set anything")
                case ast.NamedExpr(target=ast.Name(id=name)):
                    self._names[name] = Unknown(node.lineno, "...")
                    if name in self._settings:
                        raise self._refusal(statement, f"it sets {name} inside an expression")
                case ast.Call() if not (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS):
                    for each in ast.walk(node):
                        if isinstance(each, ast.Name) and isinstance(self._names.get(each.id), list | dict):
                            self._names[each.id] = Unknown(node.lineno, "...")

    def _refusal(self, statement: ast.stmt, why: str) -> UserError:
        return UserError(str(self._path), f"line {statement.lineno}: {why}", "write KEY = VALUE, or give --KEY=VALUE")

    def _value_or_unknown(self, node: ast.expr) -> Any:
        try:
            value = self._value(node)
            return value if _is_small(value) else self._unknown(node)
        except (_UnreadError, ArithmeticError, ValueError, TypeError, LookupError):
            return self._unknown(node)

    def _unknown(self, node: ast.expr) -> Unknown:
        return Unknown(node.lineno, ast.get_source_segment(self._text, node) or "?")

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                value = self._names.get(node.id, node)
                if value is node or isinstance(value, Unknown):
                    raise _UnreadError
                return value
            case ast.Tuple() | ast.List():
                items = [self._value_or_unknown(each) for each in node.elts]
                return tuple(items) if isinstance(node, ast.Tuple) else items
            case ast.Dict() if None not in node.keys:
                return {self._value(key): self._value(each) for key, each in zip(node.keys, node.values, strict=True)}  # ty: ignore[invalid-argument-type]
            case ast.UnaryOp() if type(node.op) in _UNARY:
                return _UNARY[type(node.op)](self._value(node.operand))
            case ast.BinOp() if type(node.op) in _BINARY:
                return self._binary(node)
            case ast.BoolOp():
                value = None
                for each in node.values:
                    value = self._value(each)
                    if bool(value) == isinstance(node.op, ast.Or):
                        break
                return value
            case ast.Compare():
                values = [self._value(each) for each in (node.left, *node.comparators)]
                pairs = zip(node.ops, values, values[1:], strict=False)
                return all(_COMPARED[type(op)](left, right) for op, left, right in pairs)
            case ast.IfExp():
                return self._value(node.body if self._value(node.test) else node.orelse)
            case ast.JoinedStr():
                return "".join(self._text_of(each) for each in node.values)
            case ast.Subscript() if not isinstance(node.slice, ast.Slice):
                value = self._value(node.value)[self._value(node.slice)]
                return value if not isinstance(value, Unknown) else self._fail()
            case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS and name not in self.assigned:
                if node.keywords or any(isinstance(each, ast.Starred) for each in node.args):
                    raise _UnreadError
                arguments = [self._value(each) for each in node.args]
                if not all(map(_is_small, arguments)) or (name == "round" and arguments[1:]):
                    raise _UnreadError
                return _FUNCTIONS[name](*arguments)
        raise _UnreadError

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self._value(node.left), self._value(node.right)
        if not (_is_small(left) and _is_small(right)):
            raise _UnreadError
        sizes = [len(each) for each in (left, right) if isinstance(each, str | bytes | list | tuple)]
        counts = [abs(each) for each in (left, right) if isinstance(each, int)]
        if isinstance(node.op, ast.Mult) and sizes and counts and sizes[0] * counts[0] > _MOST_ITEMS:
            raise _UnreadError
        if isinstance(node.op, ast.Pow) and (isinstance(right, int) and abs(right) > 64):
            raise _UnreadError
        if isinstance(node.op, ast.Mod) and isinstance(left, str):  # a format may ask for any width
            raise _UnreadError
        return _BINARY[type(node.op)](left, right)

    def _text_of(self, node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue):
            if node.format_spec is not None or node.conversion != -1:
                raise _UnreadError
            return str(self._value(node.value))
        return str(self._value(node))

    def _fail(self) -> Any:
        raise _UnreadError


def _bound_in(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement may assign in the file's namespace; ``*`` for whatever a module has.

    It needs no recursion, because an expression may be nested more deeply than Python can recurse.
    """
    left: list[ast.AST] = [statement]
    while left:
        node = left.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
                yield from (name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names)
                continue
            case ast.Name(ctx=ast.Store() | ast.Del()):
                yield node.id
            case ast.Import() | ast.ImportFrom():
                yield from ((each.asname or each.name).partition(".")[0] for each in node.names)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                inner: ast.AST = node
                while isinstance(inner, ast.Subscript | ast.Attribute):
                    if isinstance(inner, ast.Attribute):
                        yield inner.attr  # of the module itself, perhaps
                    inner = inner.value
                if isinstance(inner, ast.Name):
                    yield inner.id
        left.extend(ast.iter_child_nodes(node))


def _is_small(value: Any) -> bool:
    """Whether a value is small enough for any setting: repeated products would double its digits each time."""
    if isinstance(value, str | bytes | list | tuple | dict | range):
        return len(value) <= _MOST_ITEMS
    return not isinstance(value, int | float) or abs(value) < LARGEST or value != value or abs(value) == float("inf")
