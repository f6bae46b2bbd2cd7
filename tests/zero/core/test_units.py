from torch import nn

from nets import TiedHead
from zeroshard.zero.core.units import partition


def _names(spec):
    return [name for name, _ in spec.params]


def test_every_parameter_has_one_home():
    model = TiedHead()
    root, *units = partition(model, model.layers)
    homes = [param for spec in (root, *units) for _, param in spec.params]
    assert len(homes) == len(set(homes)) == len(list(model.parameters()))


def test_weights_tied_across_units_belong_to_the_root():
    model = TiedHead()
    model.layers[1][0].weight = model.layers[0][0].weight
    root, *units = partition(model, model.layers)
    assert _names(root) == ["embed.weight", "layers.0.0.weight"]
    assert "layers.1.0.weight" not in _names(units[1])


def test_weights_tied_within_a_unit_stay_in_it():
    model = TiedHead()
    model.layers[0][1].weight = model.layers[0][0].weight
    _, *units = partition(model, model.layers)
    assert _names(units[0]) == ["layers.0.0.weight", "layers.0.0.bias", "layers.0.1.bias"]


def test_a_module_registered_in_two_units_gives_its_parameters_to_the_root():
    model = TiedHead()
    model.layers[1][0] = model.layers[0][0]
    root, *_ = partition(model, model.layers)
    assert _names(root) == ["embed.weight", "layers.0.0.weight", "layers.0.0.bias"]


def test_the_innermost_unit_wins():
    model = TiedHead()
    _, *units = partition(model, [model.layers[0], model.layers[0][1]])
    assert [(unit.name, _names(unit)) for unit in units] == [
        ("layers.0", ["layers.0.0.weight", "layers.0.0.bias"]),
        ("layers.0.1", ["layers.0.1.weight", "layers.0.1.bias"]),
    ]


def test_units_keep_the_order_given_and_need_parameters():
    model = TiedHead()
    model.layers.append(nn.ReLU())
    _, *units = partition(model, [*reversed(model.layers)])
    assert [unit.name for unit in units] == ["layers.1", "layers.0"]


def test_a_unit_given_twice_is_one_and_the_model_is_the_root():
    model = TiedHead()
    assert [unit.name for unit in partition(model, [])] == ["root"]
    assert [unit.name for unit in partition(model, [model.layers[0], model.layers[0], model])] == ["root", "layers.0"]
