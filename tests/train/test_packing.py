"""Packed rows are the examples that they hold: the same losses and gradients, in every model that takes them."""

import threading

import numpy as np
import pytest
import torch

import chats
from hf_models import make_model
from tiny_runs import built
from zeroshard.data.examples.row_plan import rows_of_length
from zeroshard.data.examples.store import Examples
from zeroshard.data.prepare import prepare
from zeroshard.data.spec import DataSpec
from zeroshard.host.errors import UserError
from zeroshard.models import build_model
from zeroshard.models.attention import attend
from zeroshard.models.hugging_face import model as hugging_face
from zeroshard.train.setup.packing_check import require_apart

SEQ_LEN, VOCAB_SIZE = 48, 260
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    path = chats.write_rows(folder / "rows.jsonl", chats.pairs(40))
    return Examples(prepare(DataSpec("text", (str(path),), format="prompt"), folder / "out"), "train")


def made(kind, tmp_path):
    """A model of ours, or of `transformers`; in double precision, where sums in another order hardly differ."""
    if kind in ("gpt2-demo", "llama-tiny"):
        return build_model(kind, overrides={**SIZES, **({"n_kv_head": 1} if kind == "llama-tiny" else {})}).double()
    return build_model(f"hf:{saved(kind, tmp_path)}").double()


def saved(kind, folder, **changes):
    make_model(kind, vocab_size=VOCAB_SIZE, **changes).save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.redundant(but=["gpt2-demo"])
@pytest.mark.parametrize("kind", ["gpt2-demo", "llama-tiny", "llama", "gpt_neox", "gemma2", "mistral"])
def test_loss_and_gradients_of_packed_examples_are_those_of_single_ones(examples, kind, tmp_path):
    model = made(kind, tmp_path)
    found = []
    for packed in (False, True):
        rows = rows_of_length(examples, SEQ_LEN, split="train", packed=packed)
        tokens, targets, *positions = rows.read(np.arange(rows.num_rows))
        model.zero_grad()
        loss = model(tokens, targets, **({"positions_BT": positions[0]} if packed else {}))
        loss.backward()
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        found.append((rows.num_rows, float(loss.detach()), {name: grad.clone() for name, grad in grads.items()}))
    (num_single, alone, grads), (num_packed, together, packed_grads) = found
    assert num_packed < num_single / 2
    assert together == pytest.approx(alone, rel=1e-5)
    assert packed_grads.keys() == grads.keys()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(packed_grads[name], grad, rtol=1e-4, atol=1e-5 * largest)


@pytest.fixture
def packed_config(tiny_config, tmp_path):
    """`packed_config(model, data={}, **changes)`: a run on packed pairs."""
    path = chats.write_rows(tmp_path / "rows.jsonl", chats.pairs(80))

    def make(model="llama-tiny", data=None, out="run", **changes):
        table = {"source": "text", "path": (str(path),), "format": "prompt", "packing": True}
        table |= {"dir": str(tmp_path / "tokens"), **(data or {})}
        changes["out"] = str(tmp_path / out)
        values = {"model": model, "data": table, "seq_len": SEQ_LEN, "eval_interval": 0, "dtype": "float32", **changes}
        return tiny_config(**values)

    return make


@pytest.mark.redundant
def test_a_run_says_how_full_its_rows_are(packed_config):
    run = built(packed_config())
    tokens, _, positions = run.corpus.batches(0, 0)
    assert (positions == 0).sum() > 2 * len(tokens)
    assert run.corpus.facts["filled"] > 0.8
    assert run.corpus.facts["examples"] > 2 * run.corpus.facts["rows"]
    assert "examples in" in run.about["data"]
    assert f"{100 * run.corpus.facts['filled']:.1f} % full" in run.about["data"]
    one_each = built(packed_config(data={"packing": False}, out="single"))
    assert one_each.corpus.facts["filled"] < 0.5
    assert one_each.corpus.facts["examples"] == one_each.corpus.facts["rows"]


def test_a_model_whose_layers_carry_a_state_along_the_row_is_refused(packed_config, tmp_path):
    """Its attention is told where examples begin; its convolutions are not."""
    folder = saved("lfm2", tmp_path, layer_types=["conv", "full_attention"])
    data = {"tokenizer": "bytes"}
    with pytest.raises(UserError, match=r"data\.packing: attention crosses examples of a row"):
        built(packed_config(f"hf:{folder}", data))


def test_experts_that_are_balanced_over_a_batch_are_not_taken_for_leaks(packed_config, tmp_path):
    """The part of the loss that balances them sees all tokens, and so do the products that experts' tokens share."""
    folder = saved("mixtral", tmp_path, output_router_logits=True)
    run = built(packed_config(f"hf:{folder}", {"tokenizer": "bytes"}))
    assert run.strategy.model.balances_experts


def test_a_model_that_takes_no_positions_is_refused(packed_config, tmp_path):
    folder = saved("bloom", tmp_path)
    with pytest.raises(UserError, match=r"data\.packing: .* does not take positions for documents"):
        built(packed_config(f"hf:{folder}", {"tokenizer": "bytes"}))
    assert hugging_face.HuggingFaceModel.takes_positions


def test_flash_attention_of_transformers_is_given_examples_in_one_row(tmp_path, monkeypatch):
    """It takes rows of a batch for one example each; so they follow each other in one row, and no mask is made."""
    modelling = pytest.importorskip("transformers.modeling_flash_attention_utils")
    model = made("llama", tmp_path)
    tokens_BT = torch.randint(VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))
    positions_BT = torch.tensor([[*range(5), *range(7)], [*range(3), *range(8), 0]])
    lengths = []

    def varlen(q, k, v, *, cu_seqlens_q, **options):
        lengths.append(tuple(cu_seqlens_q.diff().tolist()))
        parts = zip(*(each.transpose(0, 1)[None].split(lengths[-1], dim=2) for each in (q, k, v)), strict=True)
        return torch.cat([attend(*part) for part in parts], dim=2)[0].transpose(0, 1)

    def computed():
        model.zero_grad()
        loss = model(tokens_BT, tokens_BT.roll(-1, 1), positions_BT=positions_BT)
        loss.backward()
        return [loss, model(tokens_BT, positions_BT=positions_BT), *(param.grad for param in model.parameters())]

    by_mask = computed()
    model.hf.config._attn_implementation_internal = "flash_attention_2"
    functions = (None, varlen, None, None, None), (lambda **options: {}, None)
    monkeypatch.setattr(modelling, "lazy_import_flash_attention", lambda *args, **named: functions)
    torch.testing.assert_close(computed(), by_mask)
    assert set(lengths) == {(5, 7, 3, 8, 1)}


def test_a_model_whose_loss_is_nan_is_not_taken_for_one_that_keeps_examples_apart():
    model = build_model("llama-tiny", vocab_size=61)
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    with pytest.raises(UserError, match=r"data\.packing: attention crosses examples of a row \(.* by nan\)"):
        require_apart(model, "data.packing", 61, 1, 8, torch.device("cpu"))


def test_what_a_compiled_model_asks_of_its_thread_is_there_before_the_first_call():
    """Else the graph of that call is guarded by its absence, and torch calls that a bug of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(dict(vars(hugging_face._documents))))
    thread.start()
    thread.join()
    assert found == [{"is_one": False}]
