"""Compares an imported model with the one it came from: both compute the logits of a few tokens, and these must agree.

An import maps names, shapes and settings. A setting that is mapped wrongly raises no error: the model merely computes
something else. Only the logits show it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from zeroshard import checkpoint
from zeroshard.errors import UserError
from zeroshard.models import GPT2Config, LlamaConfig, model_config
from zeroshard.models.hugging_face.folder import PREFIX
from zeroshard.zero.state.named_shards import read_whole

MOST_PARAMS = 1 << 28  # two float32 models of that size take 2 GiB
_TOKENS = 32
# Of the largest logit. Sums in another order differ by 1e-6 of it, and the two forms of GELU by 1e-4 or more.
_TOLERANCE = 5e-5


@torch.no_grad()
def compare_logits(source: Path, config: GPT2Config | LlamaConfig, written: Path) -> str:
    """Compare the logits of a Hugging Face folder, as `transformers` computes them, with those of its import.

    Args:
        source: the folder.
        config: the imported model's configuration.
        written: the imported model's checkpoint.

    Returns:
        What was found, in words; or why nothing was compared.

    Raises:
        UserError: the logits differ.
    """
    if find_spec("transformers") is None:
        return "logits not compared: transformers is not installed"
    with torch.device("meta"):
        shapes = {name: tuple(param.shape) for name, param in config.build().named_parameters()}
    if sum(map(torch.Size.numel, map(torch.Size, shapes.values()))) > MOST_PARAMS:
        return f"logits not compared: more than {MOST_PARAMS:,} parameters"
    ours = config.build().eval()
    with checkpoint.CheckpointReader(written, checkpoint.read_manifest(written)) as reader:
        for name, param in ours.named_parameters():
            param.copy_(read_whole(reader, name, "param", shapes[name]))
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(_TOKENS, config.seq_len)
    tokens_BT = torch.randint(config.vocab_size, (1, num_tokens), generator=generator)
    try:
        theirs = model_config(f"{PREFIX}{source}").build().eval()
    except UserError as error:
        return f"logits not compared: {error.what}"
    expected, found = theirs(tokens_BT).float(), ours(tokens_BT).float()
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE * largest:
        what = f"imported, it computes other logits than transformers (by {difference:.3g} of up to {largest:.3g})"
        raise UserError("source", what, f"train it as it is, by --model hf:{source}")
    return f"logits as transformers computes them: the largest difference is {difference:.1g}"
