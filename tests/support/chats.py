"""Conversations and pairs for tests, and a tokenizer with the marks of ChatML."""

import json
import random
from pathlib import Path
from typing import Any

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of one or two turns, of different lengths."""
    rng, found = random.Random(seed), []
    for i in range(count):
        a, b = rng.randrange(90), rng.randrange(90)
        messages = [
            {"role": "user", "content": f"{a} + {b}?"},
            {"role": "assistant", "content": "=" * (i % 5) + str(a + b)},
        ]
        if i % 3 == 0:
            more = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
            messages = [{"role": "system", "content": "Add."}, *messages, *more]
        found.append({"messages": messages})
    return found


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt": f"{i}: ", "completion": "ab" * rng.randrange(1, 9)} for i in range(count)]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tokenizer(folder: Path, template: str | None = None, **config: Any) -> Path:
    """A ``tokenizer.json`` of bytes and `MARKS` in ``folder``, and its template beside it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(MARKS))
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    if template is not None:
        config |= {"chat_template": template}
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder / "tokenizer.json"
