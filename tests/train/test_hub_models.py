"""Models of the hub, from a server on this machine: what a run needs of them beside weights."""

import pytest
import torch

import chats
from hf_models import make_model, require_transformers
from tiny_runs import built
from web import serve

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the model org/name, whose tokenizer has a template; and an empty cache of its client."""
    require_transformers()
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = tmp_path / "site" / "org" / "name"
    make_model("llama", vocab_size=300, max_position_embeddings=128).save_pretrained(folder)
    chats.write_tokenizer(folder, TEMPLATE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serve(tmp_path / "site") as site:
        addresses = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "ENDPOINT", site.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", site.address + addresses)
        yield site


def test_conversations_are_rendered_by_the_template_of_a_model_of_the_hub(hub, tiny_config, tmp_path, monkeypatch):
    path = chats.write_rows(tmp_path / "rows.jsonl", chats.conversations(80))

    def first_batch(model, out):
        data = {"source": "text", "path": (str(path),), "format": "chat", "dir": str(tmp_path / f"{out}-tokens")}
        config = tiny_config(model=model, data=data, seq_len=100, dtype="float32", out=str(tmp_path / out))
        run = built(config)
        return run.corpus.batches(0, 0)

    local = first_batch(f"hf:{hub.folder}/org/name", "local")
    found = first_batch("hf:org/name", "found")
    assert all(torch.equal(a, b) for a, b in zip(local, found, strict=True))
    assert any(each.endswith("/tokenizer_config.json") for each in hub.asked)
    hub.asked.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    again = first_batch("hf:org/name", "again")  # what was fetched is enough
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert hub.asked == []
