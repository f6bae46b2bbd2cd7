"""Renders a message with a model's chat template, and finds the text that ends the model's answer.

<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n      the prompt; ids as in training and `transformers`
The answer.<|im_end|>                                               the answer, up to the template's end of a turn
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.data import Tokenizer
from zeroshard.data.chat_templates import ChatTemplate, find_template, has_template
from zeroshard.data.examples.encode import ExampleEncoder
from zeroshard.data.examples.texts import ExampleText
from zeroshard.data.tokenizer import TOKENIZER_FILE
from zeroshard.errors import UserError
from zeroshard.models.hugging_face.folder import is_hugging_face, source_of, text_files
from zeroshard.train.config.command_settings import GenerateConfig
from zeroshard.train.setup.hugging_face import kept_folder
from zeroshard.train.setup.run_folder import tokenizer_folder

_ANSWER = "zeroshard-answer"  # stands for an answer: the template's text after it is the end of a turn


@dataclass(frozen=True)
class Chat:
    """A conversation whose next turn is the model's answer.

    Attributes:
        ids: token ids of the conversation, [T], int64.
        end: the text with which the template ends an answer; empty if it has none.
    """

    ids: Tensor
    end: str


def chat_of(config: GenerateConfig, tokenizer: Tokenizer) -> Chat:
    """Render ``config.message`` with the model's chat template, and tokenize it.

    Raises:
        UserError: the model has no chat template, or the template refuses the message.
    """
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": config.message})
    try:
        template = _template(config)
        text = template.render(messages, "--message", add_generation_prompt=True)
        answered = template.render([*messages, {"role": "assistant", "content": _ANSWER}], "--message")
    except UserError as error:
        field = "template" if error.field == "data.template" else error.field
        todo = error.todo.replace("--data.template", "--template").removeprefix("correct the row, or ")
        raise UserError(field, error.what, todo) from None
    end = answered.rpartition(_ANSWER)[2]
    (encoded,) = ExampleEncoder(tokenizer, is_chat=True)([ExampleText(text, (), "--message")])
    return Chat(torch.from_numpy(encoded.ids), end.strip() or end)


def until(pieces: Iterable[str], end: str) -> Iterator[str]:
    """Yield ``pieces`` up to the text ``end``, which may span several of them; all of them if ``end`` is empty."""
    held = ""
    for piece in pieces:
        held += piece
        before, found, _ = held.partition(end) if end else (held, "", "")
        if found:
            yield before
            return
        num_held = next((n for n in range(min(len(end) - 1, len(held)), 0, -1) if end.startswith(held[-n:])), 0)
        yield held[: len(held) - num_held]
        held = held[len(held) - num_held :]
    yield held


def _template(config: GenerateConfig) -> ChatTemplate:
    """The template that ``config`` names, else the run's, else that of the model that the run was started from."""
    if is_hugging_face(config.run):
        files = text_files(source_of(config.run))
        folders = [files[0].parent] if files else []
    else:
        folders = [tokenizer_folder(Path(config.run)), kept_folder(Path(config.run)), Path(config.run)]
    found = next((folder for folder in folders if has_template(folder)), folders[-1] if folders else Path(config.run))
    return find_template(config.template, f"json:{found / TOKENIZER_FILE}")
