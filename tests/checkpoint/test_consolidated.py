"""Whole tensors from pieces, offline: what any strategy saved, the unsharded model and optimizer load."""

import pytest
import torch
from safetensors.torch import load_file

import zeroshard
from nets import odd_net, rows
from zeroshard import checkpoint
from zeroshard.checkpoint import streamed_safetensors
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.zero import Zero


def _net():
    """`odd_net`, of which a parameter is frozen."""
    net = odd_net()
    net.first.bias.requires_grad_(False)
    net.path = lambda net, x: torch.tanh(net.blocks[0](x)) * net.scale
    return net


def _trained(path, *, stage=3, world_size=3, steps=2, optimizer=torch.optim.AdamW, ema=False, **kwargs):
    """Save at ``stage``; returns the whole weights, the whole states by name, and the averages of one process."""

    def train(comm, save):
        net = _net()
        zero = Zero(net, stage=stage if save else 0, units=net.blocks, comm=comm)
        names = {param: name for name, param in net.named_parameters()}
        decayed = [param for param in net.parameters() if param.requires_grad and param.dim() > 1]
        others = [param for param in net.parameters() if param.requires_grad and param.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optim = zero.optimizer(optimizer, groups, lr=0.01, **kwargs)
        average = zero.ema(0.5) if ema else None
        for step in range(steps):
            net(rows(comm.rank, step)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            if average is not None:
                average.update()
        if save:
            zeroshard.save(path, zero, step=steps, extra={"note": 1})
        group_names = [[names[param] for param in group["params"]] for group in groups]
        return zero.state_dict(), group_names

    return run_threads(lambda comm: train(comm, save=True), world_size)[0]


@pytest.mark.redundant(but=["0-1-in memory"])
@pytest.mark.parametrize("out", [False, True], ids=["in memory", "to a folder"])
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (3, 3)])
def test_the_unsharded_model_loads_what_was_saved(tmp_path, stage, world_size, out):
    weights, _ = _trained(tmp_path / "c", stage=stage, world_size=world_size)
    found = zeroshard.consolidate(tmp_path / "c", **({"out": tmp_path / "whole"} if out else {}))
    assert found["model"].keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found["model"][name], tensor), name
        assert found["model"][name].dtype == tensor.dtype
    _net().load_state_dict(found["model"])
    assert (found["step"], found["extra"]) == (2, {"note": 1})
    assert "ema" not in found
    assert out or found["model"]["last.weight"] is found["model"]["first.weight"]


@pytest.mark.redundant(but=["Adafactor"])
@pytest.mark.parametrize(
    ("optimizer", "kwargs", "kinds"),
    [
        (torch.optim.AdamW, {}, {"step", "exp_avg", "exp_avg_sq"}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer"}),
        (torch.optim.SGD, {}, set()),
        (torch.optim.Adafactor, {}, {"step", "row_var", "col_var"}),
    ],
    ids=["AdamW", "momentum", "no state", "Adafactor"],
)
def test_a_plain_optimizer_goes_on_from_the_consolidated_state(tmp_path, optimizer, kwargs, kinds):
    _, group_names = _trained(tmp_path / "c", optimizer=optimizer, **kwargs)
    found = zeroshard.consolidate(tmp_path / "c")
    state = found["optimizer"]
    assert [group["params"] for group in state["param_groups"]] == group_names
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    assert {group["lr"] for group in state["param_groups"]} == {0.01}
    first = state["state"].get("first.weight", {})
    assert set(first) == kinds
    assert "first.bias" not in state["state"]  # frozen
    assert "blocks.1.0.weight" not in state["state"]  # never used
    net = _net()
    net.load_state_dict(found["model"])
    named = dict(net.named_parameters())
    optim = optimizer(
        [{"params": [named[name] for name in group["params"]]} for group in state["param_groups"]], lr=1.0
    )
    optim.load_state_dict(_by_index(state))
    assert {name for name, param in named.items() if optim.state.get(param)} == set(state["state"])
    for name, by_kind in state["state"].items():
        for kind, tensor in by_kind.items():
            assert torch.equal(optim.state[named[name]][kind], tensor), (name, kind)
    assert [group["weight_decay"] for group in optim.param_groups] == [0.1, 0.0]
    net(rows(0)).square().mean().backward()
    optim.step()


def _by_index(by_name):
    """Numbered, as `torch.optim.Optimizer.load_state_dict` has it."""
    order = [name for group in by_name["param_groups"] for name in group["params"]]
    numbers = {name: index for index, name in enumerate(order)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in by_name["param_groups"]]
    return {"state": {numbers[name]: state for name, state in by_name["state"].items()}, "param_groups": groups}


def test_a_save_before_the_first_step_has_weights_and_no_states(tmp_path):
    weights, group_names = _trained(tmp_path / "c", steps=0)
    found = zeroshard.consolidate(tmp_path / "c")
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in weights.items())
    assert found["optimizer"]["state"] == {}
    assert [group["params"] for group in found["optimizer"]["param_groups"]] == group_names

    def load(comm):
        zero = Zero(_net(), stage=1, comm=comm)
        optim = zero.optimizer(torch.optim.AdamW)
        assert zeroshard.load(tmp_path / "c", zero, settings=False)["step"] == 0
        return zero.optim_state_dict(optim)["state"], zero.state_dict()

    for states, loaded in run_threads(load, 2):
        assert states == {}
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    out = zeroshard.consolidate(tmp_path / "c", out=tmp_path / "whole")
    assert out["optimizer"] == found["optimizer"]
    assert [file.name for file in (tmp_path / "whole").iterdir()] == ["model.safetensors"]


def test_an_average_is_beside_the_weights(tmp_path):
    weights, _ = _trained(tmp_path / "c", ema=True)
    found = zeroshard.consolidate(tmp_path / "c")
    assert found["ema"].keys() == weights.keys() - {"table", "empty"}
    assert not torch.equal(found["ema"]["first.weight"], weights["first.weight"])
    assert found["ema"]["last.weight"] is found["ema"]["first.weight"]
    assert "ema" not in found["optimizer"]["state"]["first.weight"]
    out = zeroshard.consolidate(tmp_path / "c", out=tmp_path / "whole")
    assert torch.equal(load_file(tmp_path / "whole" / "ema.safetensors")["scale"], out["ema"]["scale"])


def test_files_are_written_in_small_parts_and_never_a_tensor_at_once(tmp_path, monkeypatch):
    _trained(tmp_path / "c")
    reads = []
    read = checkpoint.CheckpointReader.read

    def noted(self, name, kind, interval):
        reads.append(interval[1] - interval[0])
        return read(self, name, kind, interval)

    monkeypatch.setattr(streamed_safetensors, "CHUNK_NUMEL", 7)
    monkeypatch.setattr(checkpoint.CheckpointReader, "read", noted)
    out = zeroshard.consolidate(tmp_path / "c", out=tmp_path / "whole")
    assert max(reads) == 7
    monkeypatch.undo()
    expected = zeroshard.consolidate(tmp_path / "c")
    assert all(torch.equal(out["model"][name], tensor) for name, tensor in expected["model"].items())


def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(tmp_path):
    _trained(tmp_path / "c")
    file = tmp_path / "c" / "rank-00001-of-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"rank-00001-of-00003\.safetensors: is damaged"):
        zeroshard.consolidate(tmp_path / "c", out=tmp_path / "whole")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c"]
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        zeroshard.consolidate(tmp_path / "nothing")
