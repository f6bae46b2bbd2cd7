"""Generates text with a trained run or a Hugging Face folder: one process, token by token, printed as it is drawn.

Top-k sampling: Fan et al., "Hierarchical Neural Story Generation", 2018, https://arxiv.org/abs/1805.04833.
Top-p: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019, https://arxiv.org/abs/1904.09751.

A message is rendered with the model's chat template, and the answer ends with the text that ends a turn there:

    <|im_start|>user\\n{message}<|im_end|>\\n<|im_start|>assistant\\n    the prompt; its ids are those of training
    The answer.<|im_end|>                                                the answer, up to the end of a turn
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard import checkpoint
from zeroshard.checkpoint.read_as import WeightsOnly
from zeroshard.data import Tokenizer, read_meta
from zeroshard.data.chat_templates import find_template, has_template
from zeroshard.data.examples.encode import ExampleEncoder
from zeroshard.data.examples.texts import ExampleText
from zeroshard.data.joining import prompt_ids
from zeroshard.data.tokenizer import TOKENIZER_FILE
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.models import LanguageModel, materialize, model_config
from zeroshard.models.cache import KVCache
from zeroshard.models.hugging_face.folder import (
    ADAPTER_CONFIG,
    PREFIX,
    is_hugging_face,
    only_adapters,
    source_of,
    text_files,
)
from zeroshard.models.sampling import draw
from zeroshard.train.config.command_settings import GenerateConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.named_code import require_trust
from zeroshard.train.config.toml import load_config
from zeroshard.train.setup.assemble import DTYPES, make_model, separating_id
from zeroshard.train.setup.hugging_face import kept_folder, load_model_tokenizer
from zeroshard.train.setup.init_from import whole
from zeroshard.train.setup.numerics import choose_device
from zeroshard.train.setup.run_folder import kept_tokenizer, tokenizer_folder
from zeroshard.train.state.folders import checkpoint_folder
from zeroshard.train.state.saved_run import newest_checkpoint
from zeroshard.zero.ema.average import EMA

_NEIGHBOURS = 8  # tokens on which the text of the next one may depend
_ANSWER = "zeroshard-answer"  # stands for an answer: the template's text after it is the end of a turn


def run_generate(config: GenerateConfig) -> int:
    """Print the prompt and up to ``max_new_tokens`` further tokens as they are drawn; returns the exit status.

    With several ``samples``, each text follows a line that names its seed.

    Raises:
        UserError: there is no run and no Hugging Face model, no complete checkpoint or no tokenizer, or the checkpoint
            is damaged or does not have the weights that were asked for.
    """
    model, tokenizer, ids, end = load_with_prompt(config)
    options = options_of(config, tokenizer)

    # An answer is a text of its own; without a prompt the text is that of a document.
    before = ids[len(tokenizer.around[0]) :].tolist() if config.prompt else []

    def text(tokens: Iterable[int]) -> Iterator[str]:
        # The token that stopped an answer is no text of it.
        answer = takewhile(lambda token: token not in options["stop"], tokens) if config.message else tokens
        return until(decoded(tokenizer, answer, before), end)

    for seed in range(config.seed, config.seed + config.samples):
        generator = torch.Generator(ids.device).manual_seed(seed)
        if config.samples > 1:
            print(f"--- seed {seed}")
        print(config.prompt, end="", flush=True)
        for piece in text(sample(model, ids, config.max_new_tokens, generator=generator, **options)):
            print(piece, end="", flush=True)
        print()
    return int(ExitStatus.OK)


def load_with_prompt(config: GenerateConfig) -> tuple[LanguageModel, Tokenizer, Tensor, str]:
    """The model, its tokenizer, the ids [T] of the prompt or message on the model's device, and the text to stop at.

    Raises:
        UserError: as `run_generate`.
    """
    trusted = config.model.trust_remote_code
    model, tokenizer = load_for_text(Path(config.run), config.weights, config.dtype, trusted)
    device = next(model.parameters()).device
    if config.message:
        chat = chat_of(config, tokenizer)
        return model, tokenizer, chat.ids.to(device), chat.end if config.stop else ""
    begin = prompt_ids(tokenizer, config.prompt)  # without a prompt: the ids that begin a document, if any
    ids = torch.from_numpy(begin if begin.size else tokenizer.encode_piece("\n"))
    return model, tokenizer, ids.to(device), ""


def options_of(config: GenerateConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Keyword arguments of `sample` that say how to draw."""
    return {
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "stop": tokenizer.stop_ids if config.stop else (),
        "num_ids": tokenizer.vocab_size,
    }


def nothing_in(folder: Path) -> UserError:
    """The error for a ``folder`` that has neither a run nor a model."""
    if (folder / ADAPTER_CONFIG).is_file():
        return only_adapters("run", str(folder), folder / ADAPTER_CONFIG)
    what = f"{folder} holds no run (no config.toml) and no Hugging Face model"
    if not folder.is_dir():
        what = f"{folder} is a file, not a run folder" if folder.exists() else f"there is no folder {folder}"
    inside = min(folder.glob("*/config.toml"), default=None)
    return UserError("run", what, f"give a run folder, as {inside.parent if inside else 'runs/NAME'}")


def load_for_text(
    folder: Path, weights: str = "last", dtype: str = "float32", trust_remote_code: bool = False
) -> tuple[LanguageModel, Tokenizer]:
    """The model and tokenizer of a run's checkpoint, or of a Hugging Face folder; in evaluation mode.

    ``trust_remote_code``: whether code that the folder's files name may run.

    Raises:
        UserError: as `run_generate`.
    """
    name = name_of(str(folder))
    if is_hugging_face(name):
        if weights != "last":
            what = f"{folder} holds one set of weights, and no {weights} beside it"
            raise UserError("weights", what, "use --weights last")
        model = model_config(name, overrides={"trust_remote_code": trust_remote_code})
        with choose_device("auto", 0):
            return in_dtype(model.build().eval(), dtype), load_model_tokenizer(name)
    if not (folder / "config.toml").is_file():
        raise nothing_in(folder)
    path = checkpoint_of(folder, weights)
    trained = load_config(folder / "config.toml")
    require_trust(trained.model, folder / "config.toml", trusted=trust_remote_code)
    tokenizer = kept_tokenizer(folder, trained.data)
    if tokenizer is None:
        todo = "import the model from a folder with its tokenizer.json, or train it on text"
        raise UserError("run", f"{folder} has no tokenizer", todo)
    vocab_size = read_meta(tokenizer_folder(folder)).vocab_size
    model = load_weights(trained, vocab_size, path, weights, dtype)
    model.eos_id = separating_id(trained, tokenizer.eos_id)
    return model, tokenizer


def name_of(run: str) -> str:
    """Return ``hf:FOLDER`` for a ``run`` that is a folder with a model of `transformers`; any other as it is."""
    folder = Path(run)
    plain = (folder / "config.json").is_file() and not (folder / "config.toml").is_file()
    return f"{PREFIX}{run}" if plain else run


def checkpoint_of(folder: Path, weights: str) -> Path:
    """The checkpoint of the run in ``folder``: the best if ``weights`` is ``"best"``, else the newest.

    Raises:
        UserError: there is no such checkpoint.
    """
    kept = checkpoint_folder(folder)
    if weights == "best":
        if not checkpoint.is_complete(kept / checkpoint.BEST):
            raise UserError("weights", f"{folder} keeps no best checkpoint", "train with --keep-best, or use last")
        return kept / checkpoint.BEST
    path = newest_checkpoint(kept)
    if path is None:
        raise UserError("run", f"{folder} has no complete checkpoint yet", "let it train up to one first")
    return path


def in_dtype(model: LanguageModel, dtype: str) -> LanguageModel:
    """Convert the parameters of ``model`` to ``dtype`` in place; buffers keep their dtype, as with the engine."""
    for param in model.parameters():
        param.data = param.data.to(DTYPES[dtype])
    return model


def load_weights(
    trained: TrainConfig, vocab_size: int, path: Path, weights: str = "last", dtype: str = "float32"
) -> LanguageModel:
    """The model of a run with the weights of one of its checkpoints, in evaluation mode.

    Raises:
        UserError: the checkpoint is damaged, or does not have the weights that were asked for.
    """
    # The kernels that the run was trained with may not be available here.
    model = make_model(trained.model_copy(update={"kernels": "auto"}), vocab_size, "meta")
    materialize(model, choose_device("auto", 0), draw=False)
    kind = EMA if weights == "ema" else "param"
    if all(tensor.kind != kind for tensor in checkpoint.open_manifest(path)[1].tensors):
        todo = "train with --ema-decay, or use --weights last"
        raise UserError("weights", f"{path} holds no moving average", todo)
    checkpoint.load(path, WeightsOnly(model, kind, whole(trained, model, rounded=True)))
    return in_dtype(model, dtype).eval()


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt_T: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop: int | Collection[int] | None = None,
    num_ids: int | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Draw tokens one by one; each is drawn from as much of the preceding text as fits into the model's context.

    Args:
        model: the model, which is put into evaluation mode.
        prompt_T: token ids [T], int64, T >= 1, on the model's device.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that together have this probability; 1: from all.
        generator: random generator on the model's device; None: the default one.
        stop: end after this token, or any of these; None: never end early.
        num_ids: draw only ids below it, because the ids above only pad the vocabulary. None: draw all.
        use_cache: cache keys and values while all tokens fit into the context; if not, each token recomputes all.

    Raises:
        ValueError: an empty prompt.
    """
    if prompt_T.numel() == 0:
        raise ValueError("prompt: it has no tokens; give at least one")
    stops = frozenset(() if stop is None else (stop,) if isinstance(stop, int) else stop)
    model.eval()
    if model.eos_id is not None and len(begins := (prompt_T == model.eos_id).nonzero()):
        prompt_T = prompt_T[int(begins[-1]) :]  # attention does not reach further back than the last document
    context_1T = prompt_T[None]
    cache: KVCache | None = None
    for _ in range(num_tokens):
        context_1T = context_1T[:, -model.config.seq_len :]
        if cache is None and use_cache and context_1T.shape[1] < model.config.seq_len:
            cache = model.new_cache()
        # Once the context window slides, every token's position changes, so the cache is useless.
        if cache is not None and cache.num_tokens < context_1T.shape[1]:
            logits_V = model(context_1T[:, cache.num_tokens :], cache=cache)[0, -1]
        else:
            cache, use_cache = None, False
            logits_V = model(context_1T)[0, -1]
        token_1 = draw(logits_V[:num_ids].float(), temperature, top_k, top_p, generator)
        context_1T = torch.cat([context_1T, token_1[None]], dim=1)
        yield int(token_1)
        if int(token_1) in stops:
            return
        if int(token_1) == model.eos_id:  # a document begins
            context_1T, cache = token_1[None], None


def decoded(tokenizer: Tokenizer, tokens: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
    """Yield text as tokens arrive; a character that spans several tokens is yielded with its last token.

    Args:
        before: ids of the text that they go on: [Note: Ids that go on] in `zeroshard.data.joining`.
    """
    known, ids = list(before[-_NEIGHBOURS:]), []
    said = tokenizer.decode(known) if known else ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(known + ids)
        if text.endswith("\ufffd"):  # an incomplete character: the next token may complete it
            continue
        yield text[len(said) :]
        # The newest tokens stand for all before them, so that a token's time does not grow with the text.
        known, ids = (known + ids)[-max(_NEIGHBOURS, len(ids)) :], []
        said = tokenizer.decode(known)
    if ids and (rest := tokenizer.decode(known + ids)[len(said) :]):
        yield rest


@dataclass(frozen=True)
class Chat:
    """A conversation whose next turn is the model's answer."""

    ids: Tensor  # token ids of the conversation, [T], int64
    end: str  # the text with which the template ends an answer; empty if it has none


def chat_of(config: GenerateConfig, tokenizer: Tokenizer) -> Chat:
    """Render ``config.message`` with the model's chat template, and tokenize it.

    Raises:
        UserError: the model has no chat template, or the template refuses the message.
    """
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": config.message})
    run = Path(config.run)
    folders = [tokenizer_folder(run), kept_folder(run), run]
    if is_hugging_face(config.run):
        folders = [file.parent for file in text_files(source_of(config.run))[:1]]
    # the template that is named, else the run's, else that of the model that the run was started from
    found = next((folder for folder in folders if has_template(folder)), folders[-1] if folders else run)
    try:
        template = find_template(config.template, f"json:{found / TOKENIZER_FILE}")
        with template.opened() as opened:
            text = opened.render(messages, "--message", add_generation_prompt=True)
            answered = opened.render([*messages, {"role": "assistant", "content": _ANSWER}], "--message")
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
