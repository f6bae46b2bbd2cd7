"""Runs whose base is kept in few bits: their steps are those of one process whose base has the decoded values."""

import json
import re
import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import (
    SEQ_LEN,
    VOCAB_SIZE,
    batches,
    hf_folder,  # noqa: F401 -- a fixture
    require_transformers,
    text_model,  # noqa: F401 -- a fixture
)
from tiny_runs import events_of, train_on
from zeroshard import checkpoint
from zeroshard.cli import main
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.kernels import dequantise, quantise
from zeroshard.optim.named_shards import FROZEN
from zeroshard.train.config.command_settings import EvalConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.inference.evaluation import local_score
from zeroshard.train.inference.generate import load_for_text
from zeroshard.train.setup.assemble import sharded
from zeroshard.train.setup.hugging_face import with_model_files
from zeroshard.zero import FrozenFormat

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
CPU = torch.device("cpu")
TOKENS = next(batches(1))[0]
NF4 = {"format": "nf4", "double": True}


def decoded(folder, out, base):
    """A copy of the model whose blocks' matrices have the values that codes of them stand for."""
    shutil.copytree(folder, out)
    form = FrozenFormat(base["format"], double=base.get("double", False)).form
    tensors = load_file(out / "model.safetensors")
    for name, values in tensors.items():
        if ".layers." in name and values.dim() > 1:
            flat = values.float().flatten()
            packed = torch.empty(form.num_bytes(flat.numel()), dtype=torch.uint8)
            quantise(flat, packed, form)
            dequantise(packed, flat, form)
            tensors[name] = flat.view(values.shape)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def config_of(folder, strategy, **changes):
    model = {"name": f"hf:{folder}", **changes.pop("model", {})}
    given = {"data": {"source": "synthetic"}, "lr": 1e-2, "fused": False, "device": "cpu", "dtype": "float32"}
    found = {"model": model, "lora": 4, "strategy": strategy, "seq_len": SEQ_LEN, "out": "x", **given, **changes}
    return with_model_files(TrainConfig.model_validate(found))


def losses_of(comm, config, num_steps):
    """Losses of steps of two micro-batches, the same on every rank: means over 2^n ranks are exact."""
    torch._dynamo.reset()
    _, strategy = sharded(config, VOCAB_SIZE, None, comm, CPU)
    strategy.model.train()
    found = []
    for tokens, targets in batches(num_steps):
        if (share := config.sequence_parallel) > 1:
            part = SEQ_LEN // share
            tokens, targets = (each[:, comm.rank % share * part :][:, :part] for each in (tokens, targets))
        for last in (False, True):
            with strategy.micro_batch(last):
                loss = strategy.model(tokens[2 * last :][:2], targets[2 * last :][:2])
                loss.backward()
            found.append(loss.item())
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    return found


ROWS = [
    (0, 1, {}),
    (1, 2, {"accumulate": "sharded"}),
    (2, 4, {"base": {"format": "int8"}}),
    (3, 1, {"base": {"format": "int4"}, "model": {"activation_checkpointing": "full"}}),
    (3, 2, {"offload": "optimizer", "model": {"activation_checkpointing": "offload"}}),
    (3, 4, {"shard_size": 2, "model": {"activation_checkpointing": "selective"}}),
    (2, 1, {"model": {"activation_checkpointing": "selective:2"}}),
    (3, 2, {"base": {"format": "e4m3"}, "prefetch": 0, "model": {"activation_checkpointing": "every:2"}}),
    (3, 2, {"tiles": "4", "model": {"activation_checkpointing": "full"}}),
    (3, 2, {"sequence_parallel": 2}),
    (3, 4, {"sequence_parallel": 2, "tiles": "3", "model": {"activation_checkpointing": "full"}}),
    (3, 2, {"compile": "on", "compile_backend": "eager"}),
    (3, 2, {"reproducible": 4, "optimizer": "adamw8bit"}),
    (3, 2, {"offload": {"state": "all", "fraction": "1"}}),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile
@pytest.mark.parametrize("num_steps", [3, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("stage", "world", "changes"), ROWS)
def test_losses_are_those_of_a_loop_over_the_decoded_base(hf_folder, tmp_path, stage, world, changes, num_steps):  # noqa: F811
    folder, changes = hf_folder("llama"), dict(changes)
    base = changes.pop("base", NF4)
    plain = decoded(folder, tmp_path / "decoded", base)
    config = config_of(folder, f"zero{stage}", base=base, **changes)
    found = run_threads(lambda comm: losses_of(comm, config, num_steps), world)
    if "sequence_parallel" in changes or "reproducible" in changes:  # these add up in an order of their own
        same = config_of(plain, f"zero{stage}", **changes)
        expected = run_threads(lambda comm: losses_of(comm, same, num_steps), world)
    else:
        kept = {name: changes[name] for name in ("tiles", "model") if name in changes}
        expected = [losses_of(LocalCommunicator(), config_of(plain, "ddp", **kept), num_steps)] * world
    assert found == expected
    assert len(set(found[0])) > num_steps


@pytest.fixture
def begun(text_model, tiny_config, tmp_path):  # noqa: F811
    """`begun(**changes)`: settings of a run of adapters on the text, over a base in four bits."""
    text = {"source": "text", "path": (str(tmp_path / "text.txt"),), "dir": str(tmp_path / "tokens")}
    common = {"data": text, "seq_len": 12, "max_steps": 4, "decay_steps": 4, "warmup_steps": 1, "lr": 1e-2}
    common |= {"reproducible": 2, "base": NF4, "lora": {"rank": 4}, "strategy": "zero3"}
    return lambda **changes: tiny_config(**{"model": {"name": f"hf:{text_model}"}, **common, **changes})


@pytest.mark.parametrize("by", ["model", "init_from"])
def test_a_run_is_resumed_elsewhere_evaluated_exported_and_begun_from(
    by,
    begun,
    text_model,  # noqa: F811
    tmp_path,
    capsys,
):
    where = {} if by == "model" else {"model": {}, "init_from": str(text_model)}
    if by == "init_from":  # as ours, which have no such scaling of positions
        path = text_model / "config.json"
        raw = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("rope_")}
        path.write_text(json.dumps(raw))
    losses = []
    for out, parts in (("whole", [("zero3", 1, 4)]), ("run", [("zero3", 2, 2), ("zero0", 1, 4)])):
        for strategy, world, max_steps in parts:
            resume = "none" if len(parts) == 1 or max_steps == 2 else "auto"
            config = begun(**where, out=str(tmp_path / out), strategy=strategy, max_steps=max_steps, resume=resume)
            run_threads(lambda comm, config=config: train_on(comm, config), world)
        steps = {event["step"]: event["loss"] for event in events_of(tmp_path / out, "step")}
        losses.append([*steps.values(), events_of(tmp_path / out, "eval")[-1]["loss"]])
    assert losses[0] == losses[1]

    manifest = checkpoint.read_manifest(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    kinds = {tensor.name: tensor.kind for tensor in manifest.tensors if tensor.kind in ("param", FROZEN)}
    assert {kind for name, kind in kinds.items() if ".mlp." in name or "_proj.base_layer" in name} == {FROZEN}

    for strategy in ("none", "zero3", "ddp"):
        found = local_score(EvalConfig(run=str(tmp_path / "run"), strategy=strategy, rows=6)).loss
        assert found == pytest.approx(losses[0][-1], abs=1e-6)
    assert main(["generate", str(tmp_path / "run"), "--prompt", "the quick", "--max-new-tokens", "4"]) == 0

    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]) == 0
    said = capsys.readouterr().out
    seen, written = map(float, re.search(r"loss (\S+) with nf4, (\S+) as written, on", said).groups())
    assert seen == pytest.approx(losses[0][-1], abs=5e-2)
    assert 0 < abs(seen - written) < 0.05
    if by == "model":
        peft, auto = pytest.importorskip("peft"), require_transformers().AutoModelForCausalLM
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapters")]) == 0
        assert "(trained over it in nf4)" in capsys.readouterr().out
        base = auto.from_pretrained(decoded(text_model, tmp_path / "decoded", NF4), dtype=torch.float32)
        opened = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        with torch.no_grad():
            ours = load_for_text(tmp_path / "run")[0](TOKENS)
            torch.testing.assert_close(opened(TOKENS).logits, ours, rtol=0, atol=1e-6)
    second = begun(model={}, init_from=str(tmp_path / "run"), out=str(tmp_path / "second"), max_steps=1, base="none")
    whole = {"model": {"name": f"hf:{tmp_path / 'merged'}"}}
    whole = whole if by == "model" else {"model": {}, "init_from": str(tmp_path / "merged")}
    other = begun(**whole, out=str(tmp_path / "third"), max_steps=1, base="none")
    for config in (second, other):
        train_on(LocalCommunicator(), config)
    first_losses = [events_of(config.out, "step")[0]["loss"] for config in (second, other)]
    assert first_losses[0] == pytest.approx(first_losses[1], abs=1e-6)


@pytest.mark.parametrize(
    ("logs", "beside"),
    [
        ("ema_loss", {"ema_decay": 0.5}),
        ("outer_step", {"reproducible": 0, "shard_size": 1, "local_steps": {"every": 2, "outer_lr": 0.7}}),
    ],
)
def test_averages_and_local_steps_are_those_over_the_decoded_base_and_checkpoints_are_compared(
    logs,
    beside,
    begun,
    text_model,  # noqa: F811
    tmp_path,
    capsys,
):
    plain = {"model": {"name": f"hf:{decoded(text_model, tmp_path / 'decoded', NF4)}"}, "base": "none"}
    runs = {"coded": {"strategy": "zero2"}, "plain": {**plain, "strategy": "zero2"}, "same": {"strategy": "zero0"}}
    runs |= {"int8": {"base": "int8", "strategy": "zero2", "max_steps": 1}}
    found = {}
    for name, changes in runs.items():
        config = begun(**{**beside, **changes}, out=str(tmp_path / name), eval_interval=2)
        run_threads(lambda comm, config=config: train_on(comm, config), 2)
        events = [*events_of(config.out, "step"), *events_of(config.out, "eval")]
        found[name] = [[each.get(key) for key in ("step", "loss", logs)] for each in events]
    assert found["coded"] == found["plain"] == found["same"]
    assert any(each[-1] is not None for each in found["coded"])

    def differences(name):
        capsys.readouterr()
        main(["checkpoint", "diff", str(tmp_path / "coded"), str(tmp_path / name)])
        return capsys.readouterr().out.splitlines()

    assert [line for line in differences("same") if " of " in line] == []
    name, other = "hf.model.layers.0.mlp.up_proj.weight", differences("plain")
    assert {f"{FROZEN} of {name}: only in the first", f"param of {name}: only in the second"} <= {*other}
    assert f"{FROZEN} of {name}: not equal, so the base or its format is another one" in differences("int8")


def test_adapters_go_on_over_the_base_and_the_format_that_they_began_on_alone(begun, text_model, tmp_path, refusal):  # noqa: F811
    train_on(LocalCommunicator(), begun(max_steps=2))
    for base, said in [
        ("int8", "base.format: the checkpoint was saved with nf4, now it is int8; use nf4"),
        ("none", "base.format: the checkpoint was saved with nf4, now it is none; use nf4"),
        ({**NF4, "double": False}, "base.double: the checkpoint was saved with True, now it is False; use True"),
        ({**NF4, "block": 128}, "base.block: the checkpoint was saved with 0, now it is 128; use 0"),
    ]:
        with pytest.raises(UserError, match=re.escape(said)):
            train_on(LocalCommunicator(), begun(base=base, resume="auto"))
    train_on(LocalCommunicator(), begun(base="none", max_steps=2, out=str(tmp_path / "plain")))
    with pytest.raises(UserError, match=r"base.format: the checkpoint was saved with none, now it is nf4; use none"):
        train_on(LocalCommunicator(), begun(resume="auto", out=str(tmp_path / "plain")))

    tensors = load_file(text_model / "model.safetensors")
    shutil.copytree(text_model, tmp_path / "kept")
    tensors["model.layers.1.mlp.up_proj.weight"].mul_(1.5)
    save_file(tensors, text_model / "model.safetensors", {"format": "pt"})
    other = r"up_proj.weight: .*in nf4.*had other codes of it; give the base and the frozen format that this run began"
    with pytest.raises(UserError, match=other):
        train_on(LocalCommunicator(), begun(resume="auto"))
    run = tmp_path / "run"
    said = "up_proj.weight: its values in nf4 are not those that the checkpoint's run trained adapters on"
    assert said in refusal("generate", run, "--prompt", "the")
    assert said in refusal("eval", run)
    assert said in refusal("export", run, tmp_path / "out", "--merged")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(text_model)
    assert "model" in refusal("eval", run)
    with pytest.raises(UserError, match="there is no"):
        train_on(LocalCommunicator(), begun(resume="auto"))


@pytest.mark.parametrize(
    ("words", "method"),
    [("train --model hf:{}", "bitsandbytes"), ("train --init-from {}", "gptq"), ("import {} out", "awq")],
)
def test_a_folder_that_is_quantised_already_is_refused_with_what_to_do(method, words, hf_folder, tmp_path, refusal):  # noqa: F811
    path = tmp_path / "quantised"
    shutil.copytree(hf_folder("llama"), path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": method}}))
    data = ["--data", "synthetic", "--device", "cpu", "--out", str(tmp_path / "x")] if "train" in words else []
    said = refusal(*words.format(path).split(), *data)
    assert f"quantised already ({method}); take the model before quantisation; --lora 16 --base nf4 keeps it" in said
