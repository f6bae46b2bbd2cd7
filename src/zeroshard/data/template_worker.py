"""Renders a chat template in a process of its own, because Jinja2's sandbox bounds neither time nor memory.

A template may multiply text or loop in loops, and Jinja2 computes constant expressions while it compiles. Each
conversation has `SECONDS` of processor time and the process `MEMORY_BYTES`: the kernel ends the process, or Python
raises MemoryError. `zeroshard.data.chat_templates` starts this file as a program, which imports nothing of zeroshard:

    stdin     pickles: first a `Task`; then a number n, and n times (what to do, its arguments), again and again
    stdout    for the task, then for each of the n a line of JSON: ["done", result] or [why not, ...]

The n are read before the first is answered, so neither process waits for the other with both pipes full.
"""

from __future__ import annotations

import json
import math
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

SECONDS, MEMORY_BYTES, MOST_CHARACTERS = 10, 1 << 30, 64 << 20
_BEGIN, _END = "\ue000\ue001", "\ue001\ue000"  # private-use characters around the text in {% generation %}

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


class _NoResultError(Exception):
    """The arguments are the line that says why."""


class Rendering:
    """A compiled template; raises `_NoResultError` if it is none.

    Args:
        text: its source, in Jinja2.
        special_tokens: special tokens by name, such as ``eos_token``.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        import jinja2

        self._special_tokens = special_tokens
        try:
            self._compiled = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise _NoResultError("syntax", f"line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, ValueError) as error:  # SyntaxError: Python nests less deeply than Jinja2
            raise _NoResultError("syntax", str(error)) from None

    def text(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Render a conversation as text."""
        return self._render(messages, add_generation_prompt).replace(_BEGIN, "").replace(_END, "")

    def with_spans(self, messages: Messages) -> tuple[str, list[Span]]:
        """Render a conversation as text, and return the ranges of characters that the assistant writes."""
        marked = self._render(messages, add_generation_prompt=False)
        if _BEGIN in marked:
            return _without_marks(marked)
        spans: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.text(messages[:index], add_generation_prompt=True)
            after = marked if index + 1 == len(messages) else self.text(messages[: index + 1], False)
            if not (after.startswith(before) and marked.startswith(after)):
                raise _NoResultError("unstable", index + 1)
            spans.append((len(before), len(after)))
        return marked, spans

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            text = self._compiled.render(**self._special_tokens, **given)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 -- a template may raise whatever Python does
            raise _NoResultError("refused", str(error).partition("\n")[0][:400] or type(error).__name__) from None
        if len(text) > MOST_CHARACTERS:
            raise _NoResultError("long", len(text))
        return text


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    text, spans = "", []
    for piece in marked.split(_BEGIN):
        inside, end, after = piece.partition(_END)
        if end:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def _environment() -> Any:
    """Set up Jinja2 as `transformers` does, https://huggingface.co/docs/transformers/chat_templating_writing."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``: marks the text that the model writes."""

        tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            """Compile the statement to a call of `_marked` with the enclosed text."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    names: Any = environment.globals
    names["raise_exception"] = raise_exception
    return environment


class Task(NamedTuple):
    """What the process is to do, as a plain tuple in its first pickle."""

    path: list[str]  # `sys.path` of the process that starts it: where jinja2 is
    seconds: float  # processor time for each conversation, and for compiling the template
    text: str
    special_tokens: Mapping[str, str]


def main() -> None:
    """Answer what comes over stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    task = Task(*pickle.load(sys.stdin.buffer))
    sys.path[:] = task.path
    import jinja2.sandbox  # noqa: F401 -- before memory is bounded

    _bound(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # elsewhere the kernel does not keep to it
        _bound(resource.RLIMIT_AS, MEMORY_BYTES)
    rendering = _answered(task.seconds, lambda: Rendering(task.text, task.special_tokens), silent=True)
    while rendering is not None:
        try:
            questions = [pickle.load(sys.stdin.buffer) for _ in range(pickle.load(sys.stdin.buffer))]
        except EOFError:
            return
        for name, *args in questions:
            _answered(task.seconds, partial({"text": rendering.text, "with_spans": rendering.with_spans}[name], *args))


def _answered(seconds: float, ask: Callable[[], Any], *, silent: bool = False) -> Any:
    """Call ``ask`` within its bounds, print the answer, and return its result; ``silent``: print none."""
    _bound(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
    result = None
    try:
        result = ask()
        answer = ("done", None if silent else result)
    except MemoryError:
        answer = ("memory",)
    except _NoResultError as error:
        answer = error.args
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()
    return result


def _bound(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
