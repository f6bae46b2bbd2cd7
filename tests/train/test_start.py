"""What a rank draws and holds while a run is built: what it keeps, one unit at a time, and nothing on resume."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from live_bytes import LiveBytes
from tiny_runs import built
from zeroshard import checkpoint
from zeroshard.checkpoint import api
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.models import InitialValues, build_model, decoder
from zeroshard.train.config.command_settings import EvalConfig
from zeroshard.train.inference.evaluation import local_score, score
from zeroshard.train.inference.generate import load_for_text
from zeroshard.train.start import run_training
from zeroshard.zero import STAGES, Zero, loaded_later

CPU = torch.device("cpu")
OURS = ("zero0", "zero1", "zero2", "zero3")
TORCHS = ("ddp", "fsdp2", "zero1-torch")


@pytest.fixture
def drawn(monkeypatch):
    """What was drawn, in order: name, first element, number of elements."""
    parts, fill = [], decoder.fill_normal_

    def fill_normal_(param, std, seed, name, part):
        parts.append((name, part.start if part else 0, param.numel()))
        fill(param, std, seed, name, part)

    monkeypatch.setattr(decoder, "fill_normal_", fill_normal_)
    return parts


def _peak_bytes(work):
    """The most bytes that were alive at once of what ``work`` allocated, and its result."""
    with LiveBytes() as live:
        result = work()
    return live.peak, result


def _model(device="meta", vocab_size=61):
    overrides = {"n_layer": 4, "n_head": 2, "n_embd": 32}
    with torch.device(device):
        return build_model("gpt2-demo", vocab_size=vocab_size, seq_len=16, overrides=overrides)


@pytest.mark.redundant(but=["fsdp2"])
@pytest.mark.parametrize("strategy", [*OURS, *TORCHS])
def test_a_run_that_resumes_draws_nothing(tiny_config, drawn, process_group, strategy):
    def change(**changes):
        run = built(tiny_config(strategy=strategy, **changes))
        return run.strategy

    first = change()
    assert len(drawn) == len(set(drawn)) > 4
    checkpoint.save(Path(tiny_config().out) / "checkpoints" / "step-00000001", first, step=1)
    drawn.clear()
    again = change(resume="auto")
    assert drawn == []
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name]), name


@pytest.mark.redundant
@pytest.mark.parametrize("by_parts", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_draws_what_it_keeps_and_holds_no_more_than_a_unit_beside_it(drawn, stage, by_parts):
    """An ``init`` without parts is asked on rank 0 alone, for one parameter at a time."""
    world_size = 3
    sizes = {name: 4 * param.numel() for name, param in _model().named_parameters()}
    unit_bytes = max(
        sum(size for name, size in sizes.items() if name.startswith("blocks.0.")),
        sum(size for name, size in sizes.items() if not name.startswith("blocks.")),
    )
    by_rank = []
    for rank in range(world_size):
        shapes, comm = _model(), NullCommunicator(world_size, rank)
        drawn.clear()
        init = InitialValues(shapes) if by_parts else shapes.init_parameter
        peak, zero = _peak_bytes(partial(Zero, shapes, stage, units=shapes.units, comm=comm, init=init))
        at_once = unit_bytes + (max(sizes.values()) if by_parts or rank == 0 else 0)
        assert peak <= sum(zero.memory_bytes().values()) + at_once + 2048  # flags, and what stands for freed weights
        by_rank.append(sorted(drawn))
    if not by_parts:
        assert by_rank[0]
        assert by_rank[1:] == [[], []]
        return
    keeps = sum(sizes.values()) / 4 / world_size
    assert all(0.5 * keeps < sum(numel for _, _, numel in parts) <= 1.01 * keeps for parts in by_rank)
    covered: dict[str, int] = {}
    for name, start, numel in sorted(itertools.chain(*by_rank)):
        assert start == covered.get(name, 0)  # no element twice, and none left out
        covered[name] = start + numel
    assert all(4 * numel == sizes[name] for name, numel in covered.items())


@pytest.mark.redundant
@pytest.mark.parametrize("shard_size", [None, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_what_ranks_draw_together_is_what_one_process_draws(stage, shard_size):
    """Tables of 96,000 elements, more than one generator draws."""

    def rank_main(comm):
        model = _model(vocab_size=3000)
        given = {"comm": comm, "shard_size": shard_size if stage else None, "init": InitialValues(model)}
        zero = Zero(model, stage, units=model.units, **given)
        with zero.full_params():
            return {name: param.detach().clone() for name, param in model.named_parameters()}

    one = dict(_model("cpu", vocab_size=3000).named_parameters())
    for state in run_threads(rank_main, 3 if shard_size is None else 4):
        assert state.keys() == one.keys()
        assert all(torch.equal(tensor, one[name]) for name, tensor in state.items())


@pytest.mark.redundant
def test_replicas_take_what_the_first_of_them_has_drawn():
    """Another processor may round a draw otherwise."""

    def rank_main(comm):
        model = _model()

        class Rounds(InitialValues):
            def part(self, name, values, start, numel):
                super().part(name, values, start, numel)
                values += comm.rank // 2

        return Zero(model, 3, comm=comm, shard_size=2, init=Rounds(model)).state_dict()

    one = _model("cpu").state_dict()
    for state in run_threads(rank_main, 4):
        assert all(torch.equal(tensor, one[name]) for name, tensor in state.items())


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_loaded_later_is_nan_until_then_and_nothing_is_sent(stage):
    def rank_main(comm):
        model, sent = _model(), []
        broadcast = comm.broadcast
        comm.broadcast = lambda *args, **kwargs: sent.append(args) or broadcast(*args, **kwargs)
        zero = Zero(model, stage, units=model.units, comm=comm, init=loaded_later)
        return len(sent), all(tensor.isnan().all() for tensor in zero.state_dict().values())

    assert run_threads(rank_main, 2) == [(0, True)] * 2


@pytest.mark.redundant
def test_eval_and_generate_draw_nothing_and_hold_one_model(text_config, drawn):
    config = text_config(max_steps=2, ema_decay=0.9)
    run_training(config)
    drawn.clear()
    evaluation = EvalConfig(run=config.out)
    wanted = local_score(evaluation)
    peak, (model, _) = _peak_bytes(lambda: load_for_text(Path(config.out)))
    sizes = [param.numel() * param.element_size() for param in model.parameters()]
    assert peak <= sum(sizes) + 2 * max(sizes)  # a piece on its way
    assert drawn == []

    states = []
    read = api.CheckpointReader.read

    def noted(reader, name, kind, interval):
        states.append(kind)
        return read(reader, name, kind, interval)

    api.CheckpointReader.read = noted
    try:
        spread = run_threads(lambda comm: score(evaluation.model_copy(update={"strategy": "zero3"}), comm, CPU), 2)
    finally:
        api.CheckpointReader.read = read
    assert set(states) == {"param"}  # no states of the optimizer, no average
    assert drawn == []
    for scores in spread:
        assert scores.loss == pytest.approx(wanted.loss, rel=1e-5)


@pytest.mark.redundant
def test_a_checkpoint_that_lacks_a_weight_is_refused_by_those_who_write_text(text_config, monkeypatch):
    config = text_config(max_steps=1, warmup_steps=0)
    run_training(config)
    kinds = api.CheckpointReader.kinds
    monkeypatch.setattr(
        api.CheckpointReader, "kinds", lambda reader, name: {} if name == "wpe.weight" else kinds(reader, name)
    )
    with pytest.raises(ValueError, match=r"^wpe\.weight: the checkpoint has no param of it"):
        load_for_text(Path(config.out))
