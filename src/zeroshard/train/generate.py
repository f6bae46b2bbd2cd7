"""Text from a trained run: its newest checkpoint, one process, one token at a time.

Top-k sampling: Fan et al., "Hierarchical Neural Story Generation", 2018, https://arxiv.org/abs/1805.04833.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroshard import checkpoint
from zeroshard.comm import Communicator, LocalCommunicator
from zeroshard.data import load_tokenizer
from zeroshard.errors import ExitStatus, UserError
from zeroshard.models import LanguageModel
from zeroshard.train.build import choose_device, make_model, tokenizer_folder
from zeroshard.train.config import GenerateConfig, load_config
from zeroshard.train.run import checkpoint_folder
from zeroshard.zero.ema import EMA
from zeroshard.zero.state import NamedShard, ShardReader


def run_generate(config: GenerateConfig) -> int:
    """Print the prompt and ``max_new_tokens`` more, from the newest checkpoint of a run; returns the exit status.

    Raises:
        UserError: there is no run, it has no complete checkpoint, or the checkpoint is damaged or has not the weights
            that were asked for.
    """
    folder = Path(config.run)
    if not (folder / "config.toml").is_file():
        raise UserError("run", f"{folder} holds no run (no config.toml)", "give a run folder, as in runs/NAME")
    path = checkpoint.latest(checkpoint_folder(folder))
    if path is None:
        raise UserError("run", f"{folder} has no complete checkpoint yet", "let it train up to one first")
    trained = load_config(folder / "config.toml")
    if not tokenizer_folder(folder).is_dir():
        raise UserError("run", f"{folder} has no tokenizer", "import the model from a folder with its tokenizer.json")
    tokenizer = load_tokenizer(tokenizer_folder(folder))
    device = choose_device("auto", 0)
    # The kernels that it was trained with may not be had here.
    model = make_model(trained.model_copy(update={"kernels": "auto"}), tokenizer.vocab_size, device)
    kind = EMA if config.weights == "ema" else "param"
    if all(tensor.kind != kind for tensor in checkpoint.open_manifest(path)[1].tensors):
        todo = "train with --ema-decay, or use --weights last"
        raise UserError("weights", f"{path} holds no moving average", todo)
    checkpoint.load(path, WeightsOnly(model, kind))
    prompt = config.prompt or "\n"
    ids = torch.from_numpy(tokenizer.encode(prompt)).to(device)
    generator = torch.Generator(device).manual_seed(config.seed)
    tokens = sample(
        model,
        ids,
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        generator=generator,
    )
    print(config.prompt + tokenizer.decode(list(tokens)))
    return int(ExitStatus.OK)


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt_T: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Draw tokens one after the other; each sees as much of what came before as the model can.

    Args:
        model: its logits are asked for in evaluation mode.
        prompt_T: token ids [T], int64, T >= 1, on the model's device.
        num_tokens: how many to draw.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest; 0 from all.
        generator: of the draws, on the model's device.

    Raises:
        ValueError: an empty prompt.
    """
    if prompt_T.numel() == 0:
        raise ValueError("prompt: it has no tokens; give at least one")
    model.eval()
    context_T = prompt_T
    for _ in range(num_tokens):
        context_T = context_T[-model.config.seq_len :]
        logits_V = model(context_T[None])[0, -1].float()
        token = _draw(logits_V, temperature, top_k, generator)
        context_T = torch.cat([context_T, token])
        yield int(token)


def _draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    if temperature == 0.0:
        return logits_V.argmax(keepdim=True)
    if 0 < top_k < logits_V.numel():
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    return torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator)


class WeightsOnly:
    """A model's weights as something that a checkpoint can be loaded into: without the optimizer's state.

    ``kind`` says which: ``"param"``, or ``"ema"`` for their average.
    """

    comm: Communicator = LocalCommunicator()

    def __init__(self, model: nn.Module, kind: str) -> None:
        self._model = model
        self._kind = kind

    def named_shards(self) -> Iterable[NamedShard]:
        """Nothing is saved from here."""
        return ()

    @torch.no_grad()
    def load_named_shards(self, reader: ShardReader) -> None:
        """Read weights and buffers."""
        for kind, tensors in (
            (self._kind, self._model.named_parameters()),
            ("buffer", self._model.named_buffers()),
        ):
            for name, tensor in tensors:
                if kind not in reader.kinds(name):
                    continue  # a buffer that is no part of the state
                tensor.copy_(reader.read(name, kind, (0, tensor.numel())).view_as(tensor))
