import pytest
import torch.distributed as dist

from tiny_runs import built
from zeroshard.comm import run_threads
from zeroshard.comm.rendezvous import agree_at
from zeroshard.host.errors import UserError
from zeroshard.train.setup.agree import agree_on, code_version, start_facts


@pytest.mark.parametrize(
    ("rank", "field", "value", "line"),
    [
        (2, "lr", 0.2, "lr: rank 2 has 0.2, rank 0 has 0.1; start every rank with the same settings"),
        (1, "code version", "2", "code version: rank 1 has '2', rank 0 has '1'; start every rank with the same code"),
        (0, "data", "b", "data: rank 1 has 'a', rank 0 has 'b'; start every rank with the same data"),
        (1, "more", 1, "more: rank 1 has 1, rank 0 has 'nothing'; start every rank with the same settings"),
    ],
)
@pytest.mark.parametrize("way", ["comm", "store"])
def test_the_first_rank_and_field_that_differ_are_named_on_every_rank(rank, field, value, line, way):
    store = dist.HashStore()

    def rank_main(comm):
        facts = {"seed": 1, "lr": 0.1, "code version": "1", "data": "a"}
        facts |= {field: value} if comm.rank == rank else {}
        with pytest.raises(UserError) as caught:
            agree_on(comm, facts) if way == "comm" else agree_at(store, comm.rank, 3, facts)
        return str(caught.value)

    for said in run_threads(rank_main, 3):
        assert said.startswith(line)


def test_what_may_differ_between_machines_is_no_fact():
    facts = start_facts({"lr": 0.1, "port": 3, "nproc": 2, "data": {"dir": "/a", "source": "text"}})
    assert facts.keys() == {"lr", "data.source", "code version", "torch version"}
    assert facts["code version"] == code_version()


def test_another_model_or_other_data_is_refused_by_name(tiny_config):
    def rank_main(comm):
        layers = 2 + (comm.rank == 1)
        config = tiny_config(model={"name": "gpt2-demo", "n_layer": layers, "n_embd": 16, "n_head": 2})
        with pytest.raises(UserError) as caught:
            built(config, comm)
        return str(caught.value)

    said = run_threads(rank_main, 2)
    assert said[0] == said[1]
    assert said[0].startswith("model blocks.2.")
    assert "rank 1 has 'torch.float32 [16]" in said[0]
    assert "rank 0 has 'nothing'; start every rank with the same model" in said[0]
