import pytest
import torch

from zeroshard.comm import NullCommunicator
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.models import build_model
from zeroshard.zero import Zero


def _model():
    model = build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides={"n_layer": 2, "n_head": 3, "n_embd": 9})
    model.blocks[0].double()
    next(model.blocks[1].parameters()).requires_grad_(False)
    return model


def _matrices(model):
    return [param for name, param in model.named_parameters() if param.dim() == 2 and "blocks.0" not in name]


@pytest.mark.parametrize("unsplit", ["none", "some", "all"])
def test_buffers_are_those_that_an_engine_makes_and_tensors_lie_where_it_puts_them(unsplit):
    model = _model()
    whole = {"none": [], "some": _matrices(model), "all": list(model.parameters())}[unsplit]
    predicted = buffers_of(model, 4, whole=whole)
    zero = Zero(model, comm=NullCommunicator(4))
    if whole:
        zero.optimizer(torch.optim.Adafactor, whole)
    made = [(unit.name, group) for unit in zero.units for group in unit.groups]
    assert [(b.unit, b.name, b.layout, b.dtype, b.trained) for b in predicted] == [
        (name, group.params.name, group.params.layout, group.params.master.dtype, group.trained) for name, group in made
    ]
    lie_whole = [buffer.layout.keeps_tensors_whole for buffer in predicted]
    assert (any(lie_whole), all(lie_whole)) == (unsplit != "none", unsplit == "all")
