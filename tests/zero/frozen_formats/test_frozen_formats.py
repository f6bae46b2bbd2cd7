"""Frozen weights that are kept as codes: the steps are those of one process whose weights are what codes stand for."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from coded_weights import roundtrip
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.zero import FrozenFormat, LocalSteps, MixedPrecision, Offload, Zero

DOUBLE = FrozenFormat("nf4", double=True)
CODED = [f"blocks.{block}.{layer}.base.weight" for block in range(2) for layer in ("up", "down")]


class Adapted(nn.Module):
    """A frozen linear layer, and a trained product of two small matrices beside it."""

    def __init__(self, num_in, num_out):
        super().__init__()
        self.base = nn.Linear(num_in, num_out).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, num_in) / 4), nn.Parameter(torch.randn(num_out, 2) / 4)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16).requires_grad_(False), Adapted(16, 24), Adapted(24, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    recomputes = False

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 11).requires_grad_(False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return nn.functional.cross_entropy(self.head(x), targets)


torch.manual_seed(3)
DRAWN = Model()


def _model(*, recomputes=False):
    model = copy.deepcopy(DRAWN)
    model.recomputes = recomputes
    return model


def _decoded(model, form):
    """The model with the values that codes of this form stand for."""
    for name in CODED:
        param = model.get_parameter(name)
        param.data = roundtrip(param.data, form)
    return model


def _batches(num_steps, num_rows=4):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 11, (2, num_rows, 3), generator=generator).flatten(1) for _ in range(num_steps)]


def _train(model, optimizer, batches, micro=None):
    losses = []
    for tokens, targets in batches:
        for last in (False, True):
            with micro(last) if micro else torch.enable_grad():
                loss = model(tokens, targets)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _engine(comm, stage, frozen_format=DOUBLE, model=None, **kwargs):
    zero = Zero(_model() if model is None else model, stage, comm=comm, frozen_format=frozen_format, **kwargs)
    return zero, zero.optimizer(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize(
    ("stage", "world", "frozen_format", "options"),
    [
        (0, 1, "nf4", {}),
        (3, 1, DOUBLE, {"accumulate": "sharded"}),
        (0, 2, "int8", {}),
        (1, 2, DOUBLE, {"offload": Offload()}),
        (2, 2, "e4m3", {"accumulate": "local"}),
        (3, 2, DOUBLE, {}),
        (3, 2, "int4", {"offload": Offload(weights="host"), "prefetch": 0}),
        (3, 4, FrozenFormat("nf4", block=128), {"prefetch": 2}),
        (2, 4, "nf4", {"shard_size": 2}),
    ],
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_losses_and_weights_are_those_of_one_process_with_the_decoded_weights(
    stage, world, frozen_format, options, recomputes
):
    form = (frozen_format if isinstance(frozen_format, FrozenFormat) else FrozenFormat(frozen_format)).form
    plain, batches = _decoded(_model(recomputes=recomputes), form), _batches(3)
    trained = [param for param in plain.parameters() if param.requires_grad]
    expected = _train(plain, torch.optim.AdamW(trained, lr=1e-2), batches)

    def rank(comm):
        zero, optimizer = _engine(comm, stage, frozen_format, _model(recomputes=recomputes), **options)
        return _train(zero.model, optimizer, batches, zero.micro_batch), zero.state_dict()

    for losses, state in run_threads(rank, world):
        assert losses == expected
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_keeps_codes_and_while_a_step_runs_the_decoded_weights_of_two_units(stage, world):
    def rank(comm):
        zero, optimizer = _engine(comm, stage)
        kept, in_use = [zero.memory_bytes()["params"]], []
        for block in zero.model.blocks:
            block.register_forward_hook(lambda *_: in_use.append(zero.memory_bytes()["params"]))
        _train(zero.model, optimizer, _batches(1))
        return [*kept, zero.memory_bytes()["params"]], max(in_use)

    model = _model()
    coded = [model.get_parameter(name).numel() for name in CODED]
    others = 4 * sum(p.numel() for n, p in model.named_parameters() if n not in CODED)
    codes, unsharded = sum(map(DOUBLE.form.num_bytes, coded)), 4 * sum(coded)
    shards = world if stage == 3 else 1
    for kept, most in run_threads(rank, world):
        padding = 16 * 6 * world
        assert kept[0] == kept[1]
        assert codes / shards <= kept[0] - others / shards <= codes / shards + padding
        assert most - kept[0] <= unsharded + (others if stage == 3 and world > 1 else 0) + padding


def test_a_checkpoint_has_adapters_and_a_digest_of_the_base_and_resumes_elsewhere(tmp_path):
    batches = _batches(4)

    def save(comm):
        zero, optimizer = _engine(comm, 3)
        _train(zero.model, optimizer, batches[:2])
        zeroshard.save(tmp_path / "saved", zero, step=2)
        return _train(zero.model, optimizer, batches[2:]), zero.state_dict()

    def resume(comm, stage):
        zero, optimizer = _engine(comm, stage)
        zeroshard.load(tmp_path / "saved", zero)
        return _train(zero.model, optimizer, batches[2:]), zero.state_dict()

    losses, state = run_threads(save, 2)[0]
    for stage, world in ((1, 1), (3, 4)):
        again, resumed = run_threads(partial(resume, stage=stage), world)[0]
        assert again == losses
        assert all(torch.equal(resumed[name], value) for name, value in state.items())
    whole = zeroshard.consolidate(tmp_path / "saved")
    assert whole["model"].keys() == state.keys() - set(CODED)
    assert whole["optimizer"]["state"].keys() == {name for name, p in _model().named_parameters() if p.requires_grad}

    def other_base(comm):
        model = _model()
        model.blocks[1].up.base.weight.data[0, 0] += 1
        zero, _ = _engine(comm, 3, model=model)
        before = zero.state_dict()
        with pytest.raises(UserError, match=r"^blocks.1.up.base.weight: kept in nf4, and .* other codes of it; give"):
            zeroshard.load(tmp_path / "saved", zero)
        assert all(torch.equal(before[name], value) for name, value in zero.state_dict().items())
        zero, _ = _engine(comm, 3, "int8")
        with pytest.raises(UserError, match=r"^blocks.0.up.base.weight: kept in int8, and the checkpoint's run had"):
            zeroshard.load(tmp_path / "saved", zero)
        zero, _ = _engine(comm, 3, None)
        with pytest.raises(UserError, match=r"^blocks.0.up.base.weight: the checkpoint has no param of it"):
            zeroshard.load(tmp_path / "saved", zero)

    run_threads(other_base, 2)


def test_a_checkpoint_with_values_of_the_base_is_encoded(tmp_path):
    def save(comm):
        zero, optimizer = _engine(comm, 2, None)
        _train(zero.model, optimizer, _batches(1))
        zeroshard.save(tmp_path / "saved", zero, step=1)

    def load(comm):
        model = _model()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        zero, _ = _engine(comm, 3, model=model)
        zeroshard.load(tmp_path / "saved", zero)
        return zero.state_dict()

    run_threads(save, 2)
    state, expected = run_threads(load, 2)[0], _decoded(_model(), DOUBLE.form).state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in CODED)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_users_do_with_the_weights_works_or_is_refused(stage, world):
    form, batches = DOUBLE.form, _batches(3)

    def rank(comm):
        zero, optimizer = _engine(comm, stage)
        start = zero.state_dict()
        assert torch.equal(start[CODED[0]], _decoded(_model(), form).get_parameter(CODED[0]))
        # loads what it has; then twice that, and halves it by hand
        zero.load_state_dict(start)
        assert all(torch.equal(start[name], value) for name, value in zero.state_dict().items())
        with zero.full_params(write_back=True):
            pass
        assert all(torch.equal(start[name], value) for name, value in zero.state_dict().items())
        given = {**start, CODED[0]: _model().get_parameter(CODED[0]) * 2}
        zero.load_state_dict(given)
        loaded = zero.state_dict()[CODED[0]]
        assert torch.equal(loaded, roundtrip(given[CODED[0]], form))
        with zero.full_params(write_back=True), torch.no_grad():
            zero.model.get_parameter(CODED[0]).mul_(0.5)
        assert torch.equal(zero.state_dict()[CODED[0]], roundtrip(loaded * 0.5, form))
        _train(zero.model, optimizer, batches[:1])
        assert zero.model.get_parameter(CODED[0]).sum().isnan()
        # another stage keeps the codes
        before = zero.state_dict()
        zero.restage(3 - stage)
        assert all(torch.equal(before[name], value) for name, value in zero.state_dict().items())
        averages = zero.ema(0.5)
        _train(zero.model, optimizer, batches[1:2])
        with averages.weights():
            assert zero.model(*batches[0]).isfinite()
        after = zero.state_dict()
        zero.remove()
        assert all(torch.equal(after[name], value) for name, value in zero.model.state_dict().items())

    read, rounded = "weights are read outside of forward", "keeps what was written in nf4, which rounds it; call zero.r"
    with pytest.warns(UserWarning, match=f"{read}|{rounded}") as told:
        run_threads(rank, world)
    assert all(read in str(each.message) or rounded in str(each.message) for each in told)
    assert sum(rounded in str(each.message) for each in told) == world

    def trained_later(comm):
        zero, optimizer = _engine(comm, stage)
        zero.model.requires_grad_(True)
        with pytest.raises(ValueError, match=r"^blocks.0.up.base.weight: it is to be trained, but frozen_format keeps"):
            _train(zero.model, optimizer, batches)

    def written(comm):
        zero, _ = _engine(comm, stage)
        match = r"^blocks.0.down.base.weight: it was written to while the weights were"
        with torch.no_grad(), pytest.raises(RuntimeError, match=match):
            zero.model.get_parameter(CODED[1]).mul_(2)

    run_threads(trained_later, world)
    run_threads(written, world)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_that_compute_in_16_bits_are_encoded_from_all_their_bits(stage):
    def rank(comm):
        zero, optimizer = _engine(comm, stage, precision=MixedPrecision(torch.bfloat16))
        _train(zero.model, optimizer, _batches(2))
        return zero.state_dict()

    expected = _decoded(_model(), DOUBLE.form)
    for state in run_threads(rank, 2):
        assert all(torch.equal(state[name], expected.get_parameter(name).bfloat16().float()) for name in CODED)


def test_replicas_with_local_steps_keep_codes_and_share_the_adapters_alone():
    def rank(comm):
        steps = LocalSteps(every=2)
        zero, optimizer = _engine(comm, 1, shard_size=1, local_steps=steps)
        for batch in _batches(2):
            _train(zero.model, optimizer, [batch])
            zero.local_steps.step()
        return zero.memory_bytes()["outer"], zero.state_dict()

    trained = sum(param.numel() for param in _model().parameters() if param.requires_grad)
    (outer, first), (_, second) = run_threads(rank, 2)
    assert outer == 2 * 4 * trained
    assert all(torch.equal(first[name], value) for name, value in second.items())


def _coded_names(zero):
    coded = [group.params for group in zero._runtime.groups() if not group.params.has_pieces]
    return {slot.name for params in coded for slot in params.layout.slots}


def test_patterns_choose_and_what_cannot_be_chosen_is_refused():
    comm = NullCommunicator(1)
    zero = Zero(_model(), 3, comm=comm, frozen_format=FrozenFormat("int8", only=["head.weight", "*.up.base.weight"]))
    assert _coded_names(zero) == {"head.weight", "blocks.0.up.base.weight", "blocks.1.up.base.weight"}
    kept = MixedPrecision(torch.bfloat16, keep_in_fp32_modules=("up",))
    assert _coded_names(Zero(_model(), 3, comm=comm, precision=kept, frozen_format="nf4")) == set(CODED[1::2])
    headed = _model()
    headed.lm_head = nn.Linear(16, 11).requires_grad_(False)
    units = [headed.embed, *headed.blocks, headed.lm_head]
    assert _coded_names(Zero(headed, 3, comm=comm, units=units, frozen_format="nf4")) == set(CODED)
    both = FrozenFormat(only=["*.base.weight"])
    assert _coded_names(Zero(_model(), 3, comm=comm, precision=kept, frozen_format=both)) == set(CODED)
    for model, given, error in [
        (_model(), "nf5", "frozen_format: 'nf5' is no format of frozen weights; choose one of nf4, int8, int4, e4m3"),
        (_model(), 4, "frozen_format: 4 is no format; give 'nf4', or"),
        (
            _model().requires_grad_(True),
            "nf4",
            "frozen_format: no frozen parameter of two or more dimensions",
        ),
    ]:
        with pytest.raises((ValueError, TypeError), match=f"^{error}"):
            Zero(model, 3, comm=comm, frozen_format=given)
    with pytest.raises(UserError, match=r"^frozen_format.only: 'a' is one text; give a list"):
        FrozenFormat(only="a")
    with pytest.raises(UserError, match=r"^frozen_format: no frozen parameter matches lm_head; correct"):
        Zero(_model(), 3, comm=comm, frozen_format=FrozenFormat(only=["lm_head"]))
    tied = _model()
    for name in ("up", "down"):
        getattr(tied.blocks[1], name).base.weight = getattr(tied.blocks[0], name).base.weight
    outside = (
        r"^frozen_format: blocks.0.up.base.weight is frozen and belongs to no unit; give units= that have it, or name"
    )
    with pytest.raises(UserError, match=outside):  # two units share each
        Zero(tied, 3, comm=comm, frozen_format="nf4")
    with pytest.raises(UserError, match=r"^secondary_shard_size: 2 with frozen_format, whose codes have no second"):
        run_threads(lambda comm: _engine(comm, 3, secondary_shard_size=2), 4)


def test_ranks_that_give_different_formats_are_told():
    with pytest.raises(ValueError, match=r"rank 0 has frozen_format=FrozenFormat\(name='int8'"):
        run_threads(lambda comm: _engine(comm, 3, "nf4" if comm.rank else "int8"), 2)


def test_a_copy_on_the_meta_device_is_laid_out_alike():
    with torch.device("meta"):
        model = Model()
    zero = Zero(model, 3, comm=NullCommunicator(2), frozen_format=DOUBLE, init=lambda name, tensor: None, device="meta")
    there, _ = run_threads(lambda comm: _engine(comm, 3)[0].memory_bytes(), 2)
    assert zero.memory_bytes()["params"] == there["params"]
