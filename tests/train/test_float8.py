"""``--dtype fp8``: products of blocks in 8 bits, on a CPU by torchao's emulation of them."""

import json
from functools import partial

import pytest
import torch

from exactness import same_bits
from tiny_runs import built
from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.errors import UserError
from zeroshard.interop.hf_export import run_export
from zeroshard.lab.planner.run_plan import predict
from zeroshard.models import build_model, float8
from zeroshard.models.float8 import require_float8, use_float8
from zeroshard.train.config.command_settings import ExportConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup import assemble, numerics
from zeroshard.train.setup.assemble import sharded
from zeroshard.train.start import run_training

pytest.importorskip("torchao")
SOAK = pytest.mark.soak
CPU = torch.device("cpu")
SEQ_LEN, VOCAB_SIZE, ROWS = 12, 97, 4  # 12 tokens of a row: no multiple of 16
GPT2 = {"name": "gpt2-demo", "n_layer": 1, "n_embd": 32, "n_head": 2}
LLAMA = {**GPT2, "name": "llama-tiny", "n_kv_head": 1, "ffn_hidden": 64}


@pytest.fixture
def emulated(monkeypatch):
    """A CPU computes in fp8."""
    monkeypatch.setattr(numerics, "require_float8", lambda device: None)
    monkeypatch.setattr(assemble, "use_float8", partial(use_float8, emulate=True))


def _config(**changes):
    settings = {"data": {"source": "synthetic"}, "device": "cpu", "dtype": "fp8", "seq_len": SEQ_LEN, "fused": False}
    return TrainConfig.model_validate({**settings, "model": LLAMA, "lr": 1e-3, "strategy": "zero3", **changes})


def _trained(comm, config, num_steps=2, num_micro=1):
    """Losses and norms of steps, and the strategy; ranks share out ``ROWS``, and so do micro-batches."""
    _, strategy = sharded(config, VOCAB_SIZE, None, comm, CPU)
    parts, found = comm.world_size * num_micro, []
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        tokens = torch.randint(3, VOCAB_SIZE, (ROWS, SEQ_LEN), generator=generator)
        mean = torch.zeros(())
        for micro in range(num_micro):
            part = (comm.rank * num_micro + micro) * ROWS // parts
            rows = tokens[part : part + ROWS // parts]
            with strategy.micro_batch(last=micro == num_micro - 1):
                loss = strategy.model(rows, rows.roll(-1, 1)) / num_micro
                loss.backward()
            mean += loss.detach()
        norm = float(strategy.clip_grad_norm_(0.5))
        strategy.optimizer.step()
        if strategy.ema is not None:
            strategy.ema.update()
        strategy.optimizer.zero_grad()
        if strategy.zero.local_steps is not None:
            strategy.zero.local_steps.step()
        comm.all_reduce(mean).wait()
        found.append((float(mean) / comm.world_size, norm))
    return found, strategy.state_dict()


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, "0123"),
        pytest.param({"model": GPT2}, "0123", marks=SOAK),
        ({"model": GPT2, "wire": {"weights": "e4m3", "grads": "int8"}}, "13"),
        pytest.param({"wire": {"weights": "e4m3", "grads": "int8"}}, "123", marks=SOAK),
    ],
    ids=["llama", "tied head", "on the wire, tied head", "on the wire"],
)
def test_every_stage_has_the_same_bits_and_a_loss_near_bf16s(changes, stages, emulated):
    """With clipping; products are rounded from weights that every stage has whole."""
    first, *others = [
        run_threads(lambda comm, s=stage: _trained(comm, _config(strategy=f"zero{s}", **changes)), 2)[0]
        for stage in stages
    ]
    assert all(same_bits(first, other) for other in others)
    bf16 = run_threads(lambda comm: _trained(comm, _config(**changes, dtype="bfloat16")), 2)[0]
    for (loss, norm), (plain, plain_norm) in zip(first[0], bf16[0], strict=True):
        assert loss == pytest.approx(plain, rel=5e-3)
        assert 1e-6 < abs(norm / plain_norm - 1) < 0.05  # another number, and near


def test_two_ranks_are_one_with_two_micro_batches(emulated):
    """A scale is of what one product reads, so a rank rounds as a micro-batch does."""
    two = run_threads(lambda comm: _trained(comm, _config()), 2)[0]
    one = _trained(LocalCommunicator(), _config(), num_micro=2)
    for each, expected in zip(two[0], one[0], strict=True):
        assert each == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", ["selective", *(pytest.param(how, marks=SOAK) for how in ("full", "selective:2"))])
def test_recomputing_changes_no_bit(how, emulated):
    plain = _trained(LocalCommunicator(), _config())
    assert same_bits(plain, _trained(LocalCommunicator(), _config(model={**LLAMA, "activation_checkpointing": how})))


@pytest.mark.parametrize(
    "changes", [{"optimizer": "muon", "ema_decay": 0.9}, pytest.param({"local_steps": {"every": 2}}, marks=SOAK)]
)
def test_what_else_updates_weights_finds_plain_ones(changes, emulated):
    world = {"shard_size": 1} if "local_steps" in changes else {}
    losses, weights = run_threads(lambda comm: _trained(comm, _config(**changes, **world), 4), 2)[0]
    plain = run_threads(lambda comm: _trained(comm, _config(**changes, **world, dtype="bfloat16"), 4), 2)[0]
    assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in plain[0]], rel=2e-2)
    assert {name: tensor.dtype for name, tensor in weights.items()} == dict.fromkeys(plain[1], torch.float32)


@pytest.mark.soak
def test_adapters_stay_in_16_bits_on_matrices_in_8_and_train_alone(emulated):
    pytest.importorskip("peft")
    config = _config(lora={"rank": 16, "targets": ("q_proj", "down_proj")})
    _, before = _trained(LocalCommunicator(), config, num_steps=0)
    _, after = _trained(LocalCommunicator(), config, num_steps=2)
    changed = {
        name.rpartition(".lora_")[2][:1] for name, tensor in after.items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"A", "B"}
    with torch.device("meta"):
        model = build_model(
            "llama-tiny", vocab_size=VOCAB_SIZE, lora=assemble.lora_of(config.lora),
            overrides={key: value for key, value in LLAMA.items() if key != "name"},
        )  # fmt: skip
    assert not any("lora" in name for name in float8.float8_layers(model)[0])


def test_a_run_keeps_its_plan_goes_on_from_a_checkpoint_and_is_exported(emulated, tiny_config, tmp_path, capsys):
    shape = {"model": GPT2, "dtype": "fp8", "checkpoint_interval": 3}
    held = {"plan": {"enforce": True}}
    assert run_training(tiny_config(**shape, **held), predict=predict) == 0
    assert "fp8 in 4 of 4 linear layers of blocks, else bfloat16, on cpu" in capsys.readouterr().out
    whole = checkpoint.consolidate(tmp_path / "run/checkpoints/step-00000006")
    again = str(tmp_path / "again")
    from_there = str(tmp_path / "run/checkpoints/step-00000003")
    assert run_training(tiny_config(**shape, out=again, resume=from_there, strategy="zero3")) == 0
    resumed = checkpoint.consolidate(tmp_path / "again/checkpoints/step-00000006")
    assert all(torch.equal(tensor, resumed["model"][name]) for name, tensor in whole["model"].items())
    assert run_export(ExportConfig(source=again, out=str(tmp_path / "hf"))) == 0
    assert json.loads((tmp_path / "hf/config.json").read_text())["n_embd"] == 32


def test_a_device_without_such_products_is_one_line(tiny_config, monkeypatch):
    with pytest.raises(UserError, match=r"fp8 needs a GPU .* the device is cpu; use bfloat16") as raised:
        built(tiny_config(dtype="fp8", model=GPT2))
    assert raised.value.field == "dtype"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match="a NVIDIA A100 has none; use bfloat16"):
        require_float8(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    require_float8(torch.device("cuda", 0))


def test_a_missing_package_is_one_line(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(float8, "quiet_import", missing)
    with pytest.raises(UserError, match=r'needs the package torchao; pip install "zeroshard\[fp8\]"'):
        use_float8(build_model("gpt2-demo", vocab_size=VOCAB_SIZE, overrides={"n_layer": 1, "n_embd": 16, "n_head": 1}))


def test_what_fp8_is_not_for_is_one_line(emulated, tiny_config):
    with pytest.raises(UserError, match="multiples of 16, and no block has one; use bfloat16, or another width"):
        built(tiny_config(dtype="fp8", model={**GPT2, "n_embd": 24}))
