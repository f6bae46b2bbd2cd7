"""Chat templates: render a conversation as text, in Jinja2's sandbox, as `transformers` renders it.

A model's own template lies beside its ``tokenizer.json``: ``chat_template.jinja``, or a key of
``tokenizer_config.json`` or of ``chat_template.json``. Beyond Jinja2 itself, templates may use the special tokens by
name (``bos_token``), ``raise_exception``, ``{% break %}``, and ``{% generation %} ... {% endgeneration %}`` around the
text that the model writes. ``strftime_now`` is not available, because the same data must give the same tokens on every
day.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from zeroshard.data.special_tokens import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    TOKENS_FILE,
    json_object,
    special_tokens_of,
)
from zeroshard.errors import UserError, shown
from zeroshard.regular_files import read_text, write_inside

CHATML = "chatml"
_CHATML_TEXT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JINJA_FILE, JSON_FILE = "chat_template.jinja", "chat_template.json"
# Files beside a tokenizer.json that say how conversations are rendered, and where texts and answers end.
TEMPLATE_FILES = (JINJA_FILE, TOKENIZER_CONFIG, JSON_FILE, TOKENS_FILE, GENERATION_CONFIG)
_BEGIN, _END = "\ue000\ue001", "\ue001\ue000"  # private-use characters around the text in {% generation %}
_ANOTHER = "give another by --data.template FILE"

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


@dataclass(frozen=True)
class ChatTemplate:
    """One chat template."""

    text: str  # its source, in Jinja2
    origin: str  # where it comes from, for error messages
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # special tokens by name, such as ``eos_token``

    @property
    def identity(self) -> str:
        """A hash of everything that decides how conversations are rendered."""
        content = json.dumps([self.text, sorted(self.special_tokens.items())])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise UserError if it is not a valid template, or jinja2 is not installed."""
        _ = self._compiled

    def render(self, messages: Messages, where: str, *, add_generation_prompt: bool = False) -> str:
        """Render a conversation as text.

        Args:
            messages: the messages, as the row has them.
            where: the row, for error messages.
            add_generation_prompt: end with the prompt for the model's answer.

        Raises:
            UserError: the template raises.
        """
        return self._render(messages, where, add_generation_prompt).replace(_BEGIN, "").replace(_END, "")

    def render_with_spans(self, messages: Messages, where: str) -> tuple[str, list[Span]]:
        """Render a conversation as text, and return the character ranges that the assistant writes.

        If the template marks them by ``{% generation %}``, these are the marked ranges. Otherwise each assistant turn
        gives one range: from the end of the rendered earlier messages (with the generation prompt) to the end of the
        messages rendered up to this turn.

        Raises:
            UserError: the template raises, or rendering only the first messages does not give a prefix of rendering
                them all.
        """
        marked = self._render(messages, where, add_generation_prompt=False)
        if _BEGIN in marked:
            return _without_marks(marked)
        spans: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:index], where, add_generation_prompt=True)
            after = marked if index + 1 == len(messages) else self.render(messages[: index + 1], where)
            if not (after.startswith(before) and marked.startswith(after)):
                what = f"{self.origin} renders the first {index + 1} messages of {where} differently if others follow"
                raise UserError("data.template", f"{what}, so the model's own text cannot be located", _UNSTABLE)
            spans.append((len(before), len(after)))
        return marked, spans

    def _render(self, messages: Messages, where: str, add_generation_prompt: bool) -> str:
        compiled = self._compiled
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return compiled.render(**self.special_tokens, **given)
        except Exception as error:  # noqa: BLE001 -- a template may raise whatever Python does
            said = shown(str(error).partition("\n")[0] or type(error).__name__, 200)
            what = f"{self.origin} refuses the conversation in {where}: {said}"
            raise UserError("data.template", what, f"correct the row, or {_ANOTHER}") from None

    @cached_property
    def _compiled(self) -> Any:
        try:
            import jinja2
        except ImportError:
            todo = "pip install 'zeroshard[finetune]'"
            raise UserError("data.format", "chat needs the package jinja2", todo) from None
        try:
            return _environment().from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            what = f"{self.origin} is no template: line {error.lineno}: {error.message}"
            raise UserError("data.template", what, f"correct it, or {_ANOTHER}") from None


_UNSTABLE = "mark it in the template by {% generation %} ... {% endgeneration %}, and give that by --data.template FILE"


def find_template(asked: str, tokenizer: str) -> ChatTemplate:
    """Return the template to render conversations with.

    Args:
        asked: ``data.template``: a file, ``chatml``, or empty for the tokenizer's own template.
        tokenizer: ``data.tokenizer``.

    Raises:
        UserError: the template cannot be read, or the tokenizer has none.
    """
    folder = Path(tokenizer.removeprefix("json:")).parent if tokenizer.startswith("json:") else None
    special = special_tokens_of(folder).named if folder is not None else {}
    if asked == CHATML:
        return ChatTemplate(_CHATML_TEXT, CHATML, special)
    if asked:
        return ChatTemplate(_text_of(Path(asked)), asked, special)
    text, origin = own_template(folder) if folder is not None else ("", "")
    if not text:
        what = f"the tokenizer {tokenizer} has no chat template"
        raise UserError("data.template", what, "give one by --data.template FILE, or --data.template chatml")
    return ChatTemplate(text, origin, special)


def has_template(folder: Path) -> bool:
    """Whether there is a template in ``folder``, beside a tokenizer; raises UserError if it cannot be read."""
    return bool(own_template(folder)[0])


def keep_template(folder: Path, template: ChatTemplate) -> None:
    """Write the template beside the tokenizer, where `find_template` looks for it."""
    write_inside(folder, JINJA_FILE, template.text)
    if template.special_tokens:
        write_inside(folder, TOKENS_FILE, json.dumps(dict(template.special_tokens), indent=2) + "\n")


def own_template(folder: Path) -> tuple[str, str]:
    """Return the text of the template beside a tokenizer, and where it is; empty if there is none.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / JINJA_FILE
    if path.exists():
        return _text_of(path), str(path)
    for path in (folder / TOKENIZER_CONFIG, folder / JSON_FILE):
        found = json_object(path).get("chat_template")
        if isinstance(found, list):  # several templates, by name
            named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
            found = named.get("default")
        if isinstance(found, str) and found:
            return found, f"the chat_template of {path}"
    return "", ""


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError("data.template", f"{path} cannot be read ({why})", "give a file, or chatml") from None


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
