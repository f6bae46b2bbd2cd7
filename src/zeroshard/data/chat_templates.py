"""Chat templates: render a conversation as text, in Jinja2's sandbox, as `transformers` renders it.

A template comes with a model, from anybody, so `template_worker` runs it in a process with bounds on time and memory.

A model's own template lies beside its ``tokenizer.json``: ``chat_template.jinja``, or a key of
``tokenizer_config.json`` or of ``chat_template.json``. Beyond Jinja2 itself, templates may use the special tokens by
name (``bos_token``), ``raise_exception``, ``{% break %}``, and ``{% generation %} ... {% endgeneration %}`` around the
text that the model writes. ``strftime_now`` is not available, because the same data must give the same tokens on every
day.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zeroshard.data import template_worker
from zeroshard.data.special_tokens import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    TOKENS_FILE,
    json_object,
    special_tokens_of,
)
from zeroshard.data.template_worker import MEMORY_BYTES, MOST_CHARACTERS, Messages, Span, Task
from zeroshard.host.errors import UserError, shown
from zeroshard.host.regular_files import read_text, write_inside

CHATML = "chatml"
_CHATML_TEXT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JINJA_FILE, JSON_FILE = "chat_template.jinja", "chat_template.json"
# Files beside a tokenizer.json that say how conversations are rendered, and where texts and answers end.
TEMPLATE_FILES = (JINJA_FILE, TOKENIZER_CONFIG, JSON_FILE, TOKENS_FILE, GENERATION_CONFIG)
_ANOTHER = "give another by --data.template FILE"
_TOGETHER_BYTES = 1 << 18  # conversations that are sent together
SECONDS = template_worker.SECONDS  # of processor time for one conversation, which takes far less than a millisecond


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

    @contextmanager
    def opened(self) -> Generator[OpenTemplate]:
        """Start the process that renders conversations (a tenth of a second), and end it after the block.

        Raises:
            UserError: it is not a valid template, or jinja2 is not installed.
        """
        if find_spec("jinja2") is None:
            todo = "pip install 'zeroshard[finetune]'"
            raise UserError("data.format", "chat needs the package jinja2", todo)
        command = [sys.executable, "-I", "-S", template_worker.__file__]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            try:
                yield OpenTemplate(self, process)
            finally:
                process.kill()
                with suppress(BrokenPipeError):  # a question that it has not read
                    process.stdin.close()


class OpenTemplate:
    """A template whose process runs; one thread may use it at a time.

    Args:
        process: the process, to which nothing was sent yet.
    """

    def __init__(self, template: ChatTemplate, process: subprocess.Popen[bytes]) -> None:
        self.origin, self._process = template.origin, process
        task = tuple(Task(sys.path, SECONDS, template.text, dict(template.special_tokens)))
        list(self._answers(pickle.dumps(task), [""]))

    def render(self, messages: Messages, where: str, *, add_generation_prompt: bool = False) -> str:
        """Render a conversation as text.

        Args:
            messages: the messages, as the row has them.
            where: the row, for error messages.
            add_generation_prompt: end with the prompt for the model's answer.

        Raises:
            UserError: the template raises, or takes too much time or memory.
        """
        question = pickle.dumps(("text", messages, add_generation_prompt))
        return next(self._answers(pickle.dumps(1) + question, [where]))

    def render_with_spans(self, conversations: Iterable[tuple[str, Messages]]) -> Iterator[tuple[str, list[Span]]]:
        """Render conversations as text, and yield for each its text and the character ranges that the assistant writes.

        Each comes with its row, for error messages. Some are taken ahead, because a question by itself costs as much as
        a conversation.

        If the template marks them by ``{% generation %}``, these are the marked ranges. Otherwise each assistant turn
        gives one range: from the end of the rendered earlier messages (with the generation prompt) to the end of the
        messages rendered up to this turn.

        Raises:
            UserError: as `render`; or rendering only the first messages does not give a prefix of rendering them all.
        """
        questions, rows, num_bytes = [], [], 0
        for where, messages in conversations:
            questions.append(pickle.dumps(("with_spans", messages)))
            rows.append(where)
            num_bytes += len(questions[-1])
            if num_bytes >= _TOGETHER_BYTES:
                yield from self._answers(pickle.dumps(len(rows)) + b"".join(questions), rows)
                questions, rows, num_bytes = [], [], 0
        yield from self._answers(pickle.dumps(len(rows)) + b"".join(questions), rows)

    def _answers(self, questions: bytes, rows: Sequence[str]) -> Iterator[Any]:
        """Send questions, and yield their results; ``rows``: for each question its row, empty for the template."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended, which reading tells
            self._process.stdin.write(questions)
            self._process.stdin.flush()
        lines = [self._process.stdout.readline() for _ in rows]  # all of them, whatever the caller takes
        for line, where in zip(lines, rows, strict=True):
            kind, *more = json.loads(line) if line.endswith(b"\n") else ("ended", self._process.wait())
            if kind != "done":
                raise self._refusal(kind, more[0] if more else None, where)
            yield more[0]

    def _refusal(self, kind: str, more: Any, where: str) -> UserError:
        """Return the error for an answer without a result."""
        todo, of = f"correct it, or {_ANOTHER}", f" for {where}" if where else ""
        if kind == "refused":
            what = f"{self.origin} refuses the conversation in {where}: {shown(more, 200)}"
            return UserError("data.template", what, f"correct the row, or {_ANOTHER}")
        if kind == "unstable":
            what = f"{self.origin} renders the first {more} messages of {where} differently if others follow"
            return UserError("data.template", f"{what}, so the model's own text cannot be located", _UNSTABLE)
        if kind == "ended":
            ended = f"ended with status {more}"
            kind = f"takes more than {SECONDS} s of computing" if more == -signal.SIGXCPU else ended
        said = {
            "syntax": f"is no template: {more}",
            "memory": f"takes more than {MEMORY_BYTES >> 20:,} MiB of memory",
            "long": f"writes {more:,} characters, more than {MOST_CHARACTERS:,}" if kind == "long" else "",
        }
        return UserError("data.template", f"{self.origin} {said.get(kind, kind)}{of}", todo)


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
