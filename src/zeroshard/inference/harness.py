"""Our models in EleutherAI's lm-evaluation-harness: ``zeroshard eval RUN --tasks hellaswag arc_easy``.

The harness makes three kinds of requests: the likelihood of a continuation after a context, the likelihood of a
complete text, and a generated continuation up to given stop strings.
See https://github.com/EleutherAI/lm-evaluation-harness, docs/model_guide.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.data import Tokenizer
from zeroshard.errors import ExitStatus, UserError
from zeroshard.inference.generate import load_for_text, sample
from zeroshard.models import LanguageModel
from zeroshard.train.config.command_settings import EvalConfig


def run_tasks(config: EvalConfig) -> int:
    """Run tasks of the harness on a model and print their results; returns the exit status.

    Raises:
        UserError: the harness is not installed, there is no such task, or the model cannot be loaded.
    """
    if find_spec("lm_eval") is None:
        raise UserError("tasks", "they need the package lm-eval", "pip install 'zeroshard[lm-eval]'")
    harness: Any = import_module("lm_eval")
    tasks: Any = import_module("lm_eval.tasks")
    # A task may be the user's own .yaml file; the harness then searches its folder.
    folders = [str(Path(task).parent) for task in config.tasks if task.endswith(".yaml")]
    names = [Path(task).stem if task.endswith(".yaml") else task for task in config.tasks]
    manager = tasks.TaskManager(include_path=folders or None)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError("tasks", f"the harness has no task {name!r}", "see `lm-eval ls tasks`, or give a .yaml")
    trusted = config.model.trust_remote_code
    model, tokenizer = load_for_text(Path(config.run), config.weights, config.dtype, trusted)
    found: dict[str, Any] | None = harness.simple_evaluate(
        model=harness_model(model, tokenizer, config.micro_batch_size),
        tasks=names,
        limit=config.limit or None,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    assert found is not None  # it is None only on ranks other than 0
    print(json.dumps(found["results"]) if config.json_line else _in_words(found["results"]))
    return int(ExitStatus.OK)


def harness_model(model: LanguageModel, tokenizer: Tokenizer, batch_size: int = 8) -> Any:
    """Wrap a model for the harness, as a subclass of its ``TemplateLM``.

    Args:
        model: the model, in evaluation mode.
        tokenizer: the model's tokenizer.
        batch_size: sequences in one forward pass.
    """
    utils: Any = import_module("lm_eval.utils")
    base: Any = import_module("lm_eval.api.model").TemplateLM

    class HarnessModel(base):
        """The wrapped model. The class is defined in this function, because the harness is only imported when used."""

        @property
        def eot_token_id(self) -> int:
            """The token before the beginning of a text: the end of a document, or a newline if there is no such id."""
            return tokenizer.eos_id if tokenizer.eos_id is not None else int(tokenizer.encode_piece("\n")[-1])

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            """Token ids of a text, without special tokens unless asked for, as in the harness's Hugging Face model."""
            return (tokenizer.encode if add_special_tokens else tokenizer.encode_piece)(string).tolist()

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            pairs = [(list(context), list(continuation)) for _, context, continuation in requests]
            return loglikelihoods(model, pairs, batch_size)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            """Log-likelihoods of complete texts; each token is predicted from as much context as the model can take."""
            totals = []
            for (text,) in (request.args for request in requests):
                ids = self.tok_encode(text)
                windows = utils.get_rolling_token_windows(ids, self.eot_token_id, model.config.seq_len, 1)
                pairs = [utils.make_disjoint_window(window) for window in windows]
                found = loglikelihoods(model, [(list(a), list(b)) for a, b in pairs], batch_size)
                totals.append(sum(each for each, _ in found))
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            """The generated continuation of each context, up to the first of its stop strings."""
            asked = (request.args for request in requests)
            return [
                _continuation(model, tokenizer, self.tok_encode(context) or [self.eot_token_id], settings)
                for context, settings in asked
            ]

    return HarnessModel()


def _continuation(model: LanguageModel, tokenizer: Tokenizer, ids: list[int], settings: dict[str, Any]) -> str:
    """Generate a continuation of the context ``ids`` with the harness's generation settings."""
    until = settings.get("until") or []
    until = [until] if isinstance(until, str) else until
    heat = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
    limit = int(settings.get("max_gen_toks", 256))
    prompt = torch.tensor(ids[-max(1, model.config.seq_len - limit) :], device=_device(model))
    written: list[int] = []
    stop, num_ids = tokenizer.stop_ids, tokenizer.vocab_size
    for token in sample(model, prompt, limit, temperature=heat, stop=stop, num_ids=num_ids):
        if token in stop:
            break
        written.append(token)
        text = tokenizer.decode(written)
        ends = [place for place in (text.find(word) for word in until if word) if place >= 0]
        if ends:
            return text[: min(ends)]
    return tokenizer.decode(written)


@torch.no_grad()
def loglikelihoods(
    model: LanguageModel, pairs: Sequence[tuple[list[int], list[int]]], batch_size: int
) -> list[tuple[float, bool]]:
    """For each (context, continuation): the continuation's log-likelihood in nats, and whether it is the greedy one.

    A context that is too long for the model loses its beginning. Sequences are padded at the end, which causal
    attention does not see. The longest come first, so that a lack of memory shows at the first batch.
    """
    rows = []
    for context, continuation in pairs:
        whole = (context + continuation)[-(model.config.seq_len + 1) :]
        rows.append((whole, min(len(continuation), len(whole) - 1)))
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place][0]))
    found: dict[int, tuple[float, bool]] = {}
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        longest = len(rows[places[0]][0]) - 1
        tokens_BT = torch.zeros(len(places), longest, dtype=torch.int64, device=_device(model))
        for row, place in enumerate(places):
            ids = rows[place][0]
            tokens_BT[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        logits_BTV = model(tokens_BT)
        for row, place in enumerate(places):
            ids, num_asked = rows[place]
            found[place] = _score(logits_BTV[row, len(ids) - 1 - num_asked : len(ids) - 1], ids[len(ids) - num_asked :])
    return [found[place] for place in range(len(rows))]


def _score(logits_TV: Tensor, wanted: list[int]) -> tuple[float, bool]:
    wanted_T = torch.tensor(wanted, device=logits_TV.device)
    chances_TV = torch.log_softmax(logits_TV.float(), dim=-1)
    total = float(chances_TV.gather(1, wanted_T[:, None]).sum(dtype=torch.float64))
    return total, bool((chances_TV.argmax(-1) == wanted_T).all())


def _device(model: LanguageModel) -> torch.device:
    return next(model.parameters()).device


def _in_words(results: dict[str, dict[str, Any]]) -> str:
    lines = []
    for task, values in results.items():
        numbers = [
            f"{name.removesuffix(',none')} {value:.4f}"
            for name, value in values.items()
            if isinstance(value, float) and "stderr" not in name
        ]
        lines.append("  ".join([task, *numbers]))
    return "\n".join(lines)
