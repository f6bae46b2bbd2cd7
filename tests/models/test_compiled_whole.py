"""`torch.compile` of a whole model: how many graphs it is, that a step adds none, and that losses are those of eager.

Graphs are counted by a backend that runs them as they are, so nothing is generated.
"""

from itertools import product
from typing import Any

import pytest
import torch

from hf_models import VOCAB_SIZE, hf_folder  # noqa: F401 -- a fixture
from pairwise import cover
from zeroshard.comm.backends.null import NullCommunicator
from zeroshard.models import build_model
from zeroshard.models.adapters import Lora
from zeroshard.zero import Zero

OURS = {
    "gpt2": ("gpt2-demo", {"n_layer": 3, "n_head": 2, "n_embd": 16, "seq_len": 12}),
    "llama": (
        "llama-tiny",
        {"n_layer": 3, "n_head": 2, "n_kv_head": 1, "n_embd": 16, "ffn_hidden": 24, "seq_len": 12},
    ),
}
MODELS = [*OURS, "qwen2", "qwen3", "gemma2", "mistral"]
RECOMPUTED = ["none", "full", "selective", "selective:2", "every:2", "offload"]
AXES = (MODELS, [1, 2], [0, 1, 2, 3], RECOMPUTED, ["", "lora"], ["", "packed"], ["compile", "forward"])
EVERY = list(product(*AXES))
QUICK = {EVERY[place] for place in cover(EVERY, [0])}  # each value once
PAIRS = [EVERY[place] for place in cover(EVERY)]
CASES = [
    *sorted(QUICK, key=EVERY.index),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in PAIRS if case not in QUICK),
]

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.all: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.all.append(graph)
        return graph.forward

    @property
    def num_of_blocks(self) -> int:
        """Graphs with attention, also inside of what is recomputed."""
        codes = ["".join(getattr(part, "code", "") for part in graph.modules()) for graph in self.all]
        return sum("scaled_dot_product_attention" in code or "functional.softmax" in code for code in codes)


def trained(model, stage, num_ranks, packed, compiled=""):
    """Losses of three steps of two micro-batches, an evaluation after the first; the graphs after each forward."""
    graphs = Graphs()
    zero = Zero(model, stage, units=model.units, comm=NullCommunicator(num_ranks))
    optim = zero.optimizer(torch.optim.AdamW, [p for p in model.parameters() if p.requires_grad], lr=1e-2)
    called = model
    if compiled == "compile":
        called = torch.compile(model, backend=graphs)
    elif compiled:
        model.forward = torch.compile(model.forward, backend=graphs)
    generator, losses, counts = torch.Generator().manual_seed(0), [], []
    places = torch.tensor([[*range(5), *range(7)]] * 2) if packed else None
    given = {} if places is None else {"positions_BT": places}
    for step in range(2):
        for last in (False, True):
            tokens, targets = (torch.randint(VOCAB_SIZE, (2, 12), generator=generator) for _ in range(2))
            with zero.micro_batch(last):
                loss = called(tokens, targets, **given)
                loss.backward()
            losses.append(loss.item())
            counts.append((len(graphs.all), graphs.num_of_blocks))
        optim.step()
        optim.zero_grad()
        if step == 0:
            model.eval()
            with torch.no_grad():
                losses.append(called(tokens, targets, **given).item())
            model.train()
            counts.append((len(graphs.all), graphs.num_of_blocks))
    return losses, counts


@pytest.mark.redundant(
    but=[
        "gpt2-1-0-none---compile",
        "llama-2-1-full-lora-packed-forward",
    ]
)
@pytest.mark.parametrize(("kind", "num_ranks", "stage", "recomputed", "adapters", "packed", "compiled"), CASES)
def test_a_model_is_one_graph_or_one_code_for_all_blocks_and_a_step_adds_none(
    kind, num_ranks, stage, recomputed, adapters, packed, compiled, request
):
    if adapters:
        pytest.importorskip("peft")
    name, sizes = OURS.get(kind, (kind, {}))
    if kind not in OURS:
        name = f"hf:{request.getfixturevalue('hf_folder')(kind)}"
    overrides = {**sizes, **({} if recomputed == "none" else {"activation_checkpointing": recomputed})}
    lora = Lora(rank=2, alpha=4) if adapters else None

    def model():
        torch.manual_seed(0)
        return build_model(name, vocab_size=VOCAB_SIZE, overrides=overrides, lora=lora)

    expected, _ = trained(model(), stage, num_ranks, packed)
    losses, counts = trained(model(), stage, num_ranks, packed, compiled)
    assert losses == pytest.approx(expected, rel=1e-5)
    first, second, evaluated, *later = counts
    assert first == second
    assert set(later) == {evaluated}
    if num_ranks == 1 and recomputed != "offload":
        assert (first, evaluated) == ((1, 1), (2, 2))
        return
    # Frozen embeddings give the first block an input without a gradient, and some blocks are recomputed.
    codes = {
        (bool(adapters) and block == 0, recomputed == "every:2" and block % 2) for block in range(len(model().blocks))
    }
    # In evaluation blocks of transformers that would be recomputed are still called by a function of their own.
    evaluations = 2 if recomputed == "every:2" and kind not in OURS else 1
    assert (first[1], evaluated[1]) == (len(codes), len(codes) + evaluations)
    if kind in OURS:
        around = 2 if kind == "gpt2" or not num_ranks > 1 else 3  # LLaMA's embedding is a unit, at whose end one ends
        assert (first[0], evaluated[0]) == (len(codes) + around, len(codes) + 1 + 2 * around)
