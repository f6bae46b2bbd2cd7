"""Models of `transformers` with peft's adapters, whose base the engine keeps as codes: steps, generation, merging."""

import copy
from importlib.util import find_spec

import pytest
import torch

from coded_weights import roundtrip
from hf_models import ARCHITECTURES, batches, make_model
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.zero import FrozenFormat, Zero

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed") for name in ("transformers", "peft")
]

FORM = FrozenFormat("nf4").form
ALWAYS = {("llama", 3, 2), ("mixtral", 3, 1), ("gemma2", 1, 2)}


def _adapted(kind):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(kind), LoraConfig(r=2, target_modules=["q_proj", "o_proj", "dense"]))
    generator = torch.Generator().manual_seed(1)
    for name, param in model.named_parameters():
        if param.requires_grad:  # peft begins with zeros
            param.data = torch.randn(param.shape, generator=generator) / 10
        elif param.dim() >= 2 and ".layers." in name:
            yield name
    yield model.train()


def _trained(model, optimizer, num_steps=2):
    losses = []
    for tokens, targets in batches(num_steps):
        loss = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _generated(model):
    return model.eval().generate(input_ids=torch.arange(5, 11).view(1, 6), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize(
    ("kind", "stage", "world"),
    [
        pytest.param(kind, stage, world, marks=[] if (kind, stage, world) in ALWAYS else [pytest.mark.soak])
        for kind in sorted(ARCHITECTURES.keys() - {"gpt_neox"})
        for stage, world in ((0, 1), (3, 1), (1, 2), (2, 2), (3, 2))
    ],
)
def test_adapters_train_on_the_decoded_base_generate_and_merge(kind, stage, world):
    *coded, model = _adapted(kind)
    plain = copy.deepcopy(model)
    for name in coded:
        plain.get_parameter(name).data = roundtrip(plain.get_parameter(name).data, FORM)
    trained = [param for param in plain.parameters() if param.requires_grad]
    expected = _trained(plain, torch.optim.AdamW(trained, lr=1e-2))
    text = _generated(plain)
    weights, merged = plain.state_dict(), copy.deepcopy(plain).merge_and_unload().state_dict()

    def rank(comm):
        zero = Zero(copy.deepcopy(model), stage, "auto", comm=comm, frozen_format="nf4")
        assert _trained(zero.model, zero.optimizer(torch.optim.AdamW, lr=1e-2)) == expected
        state = zero.state_dict()
        assert all(torch.equal(state[name], value) for name, value in weights.items())
        with zero.full_params(), torch.no_grad():
            assert torch.equal(_generated(zero.model), text)
        zero.remove()
        found = zero.model.merge_and_unload().state_dict()
        assert all(torch.equal(found[name], value) for name, value in merged.items())

    run_threads(rank, world)


def test_adapters_that_come_after_the_engine_are_refused():
    from peft import LoraConfig, get_peft_model

    model = make_model("llama").requires_grad_(False)
    Zero(model, 0, "auto", NullCommunicator(1), frozen_format="nf4")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    optimizer = torch.optim.SGD([param for param in adapted.parameters() if param.requires_grad], lr=1.0)
    with pytest.raises(RuntimeError, match=r"lora_A.default.weight: a parameter that comes after Zero\(\) would never"):
        _trained(adapted, optimizer, 1)
