import pytest
import torch
from torch import nn

from nets import TiedHead
from zeroshard.zero import loaded_later
from zeroshard.zero.meta_models import materialise
from zeroshard.zero.unit_choice import describe_units, partition_of

TIED = TiedHead()


def _names(spec):
    return [name for name, _ in spec.params]


def test_units_are_the_elements_of_outermost_module_lists_or_what_a_generator_yields():
    model = TiedHead()
    assert len(partition_of(model, (layer for layer in model.layers))[1]) == 2
    root, units = partition_of(model, None)
    assert [unit.name for unit in units] == ["layers.0", "layers.1"]
    assert _names(units[0]) == ["layers.0.0.weight", "layers.0.0.bias", "layers.0.1.weight", "layers.0.1.bias"]
    assert _names(root) == ["embed.weight"]


@pytest.mark.parametrize(
    ("units", "error", "message"),
    [
        ([3], TypeError, "units: int is not an nn.Module"),
        ([nn.Linear(2, 2)], ValueError, "units: a Linear is no submodule of the model"),
        ([TIED.layers], ValueError, "units: 'layers' is a container that is never called; give its elements"),
    ],
)
def test_units_that_are_not_the_models_or_never_called_are_refused(units, error, message):
    with pytest.raises(error, match=message):
        partition_of(TIED, units)


def test_materialised_parameters_are_nan_take_no_memory_and_stay_tied():
    with torch.device("meta"):
        model = TiedHead()
    model.embed.weight.requires_grad_(False)
    made = materialise(model, torch.device("cpu"))
    assert model.head.weight is model.embed.weight
    assert made == set(model.parameters())
    assert all(param.untyped_storage().nbytes() == 4 for param in made)
    assert model.embed.weight.shape == (5, 3)
    assert model.embed.weight.isnan().all()
    assert not model.embed.weight.requires_grad
    assert model.layers[0][0].weight.requires_grad


def test_a_buffer_on_the_meta_device_is_filled_by_init():
    """A rotary embedding's frequencies, say: no part of a state dict, and computed by whoever builds the model."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Module())
        model[1].register_buffer("inv_freq", torch.ones(3), persistent=False)
        model[1].also = model[1].inv_freq
        model[1].register_buffer("tied", model[1].inv_freq)
    asked = []

    def init(name, tensor):
        asked.append(name)
        tensor.copy_(torch.arange(3.0))

    materialise(model, torch.device("cpu"), init)
    assert asked == ["1.inv_freq"]
    assert model[1].inv_freq.tolist() == [0, 1, 2]
    assert model[1].tied is model[1].inv_freq


@pytest.mark.parametrize(
    ("init", "said"), [(None, ""), *((init, ", and `init` .*fill it") for init in (lambda name, _: {}[name], print))]
)
def test_a_buffer_on_the_meta_device_that_nobody_fills_is_refused_by_name(init, said):
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=rf"^0\.running_mean: the buffer is on the meta device{said}"):
        materialise(model, torch.device("cpu"), init)


def test_lists_in_lists_give_the_modules_that_are_called():
    class Group(nn.Module):
        """Holds modules and has no forward."""

        def __init__(self):
            super().__init__()
            self.one, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    model = nn.Module()
    model.stages = nn.ModuleList(
        [nn.ModuleList([nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2)})]), Group(), nn.Linear(2, 2)]
    )
    root, units = partition_of(model, None)
    assert [unit.name for unit in units] == ["stages.0.0", "stages.0.1.a", "stages.1.one", "stages.2"]
    assert _names(root) == ["stages.1.scale"]
    with pytest.raises(ValueError, match=r"^units: 'stages.1' is a container that is never called"):
        partition_of(model, [model.stages[1]])


def test_a_buffer_that_no_load_brings_is_not_left_for_later():
    with torch.device("meta"):
        model = nn.BatchNorm1d(2)
        materialise(model, torch.device("cpu"), loaded_later)
        model.register_buffer("inv_freq", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"^inv_freq: the buffer is on the meta device, and `init` left NaN in it"):
        materialise(model, torch.device("cpu"), loaded_later)


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3))


class Pretrained(nn.Module):
    """As `transformers` makes them: it names its blocks' classes, some of which it may not have."""

    _no_split_modules = ("Layer", "Absent")

    def __init__(self):
        super().__init__()
        self.side = nn.ModuleList(nn.Linear(30, 30) for _ in range(2))
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))


def test_blocks_are_found_in_a_sequential_where_there_is_no_list():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]
    assert [unit.name for unit in partition_of(nn.Sequential(*blocks), "auto")[1]] == ["0", "1", "2"]
    head = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    found = partition_of(nn.ModuleDict({"body": nn.Sequential(*blocks), "head": head}), "auto")[1]
    assert [unit.name for unit in found] == ["body.0", "body.1", "body.2"]


@pytest.mark.parametrize("units", ["auto", "Layer", Layer, ["Layer"], "model.layers", ["model.layers.0", Layer]])
def test_units_may_be_words(units):
    model = Pretrained()
    assert [unit.module for unit in partition_of(model, units)[1]] == list(model.model.layers)


def test_without_names_auto_is_the_largest_list_of_one_class():
    model = Pretrained()
    model._no_split_modules = None
    assert [unit.name for unit in partition_of(model, "auto")[1]] == ["side.0", "side.1"]


@pytest.mark.parametrize(
    ("units", "error", "message"),
    [
        ("Leyer", ValueError, "units: 'Leyer' is neither a class .*ModuleList, Linear, Module, Layer.* mean Layer"),
        ("model.blocks", ValueError, "units: the path 'model.blocks' leads to 'model' and no further; 'model' has la"),
        (nn.GRU, ValueError, "units: no part of the model is a GRU; its classes are ModuleList, Linear, Module, Layer"),
        ([dict], TypeError, "units: dict is not an nn.Module"),
        (3, TypeError, "units: a int; give submodules, a class, its name, a path, or 'auto'"),
    ],
)
def test_words_that_mean_no_unit_are_refused_with_what_there_is(units, error, message):
    with pytest.raises(error, match=message) as refused:
        partition_of(Pretrained(), units)
    assert "\n" not in str(refused.value)


def test_what_was_chosen_is_one_line():
    model = Pretrained()
    assert describe_units(model, list(model.model.layers)) == "2 units: Layer, model.layers.0 ... model.layers.1"
    assert describe_units(model, []) == "no units: all parameters are gathered together"
