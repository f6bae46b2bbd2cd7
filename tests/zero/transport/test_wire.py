"""Weights and gradients that travel in a wire format: among all ranks, and in two steps over nodes."""

import copy
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

from exactness import same_bits
from late import late
from zero.transport.wire_runs import batch, net, steps
from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.settings.wire_formats import BlockFormat
from zeroshard.zero import MixedPrecision, Zero
from zeroshard.zero.buffers.changed_values import bit_sums

INT8 = MixedPrecision(gather="int8", reduce="int8", block=64)


def _in_nodes(size):
    return MixedPrecision(gather="int8", reduce="int8", block=64, node_size=size)


WIRES = {
    "int8, nodes of 2": _in_nodes(2),
    "int8, nodes of 3": _in_nodes(3),
    "int8": INT8,
    "int4": MixedPrecision(gather="int8", reduce="int4", block=64),
    "e4m3": MixedPrecision(gather="e4m3", reduce="e4m3", block=32),
    "bf16": MixedPrecision(gather=torch.bfloat16, reduce=torch.bfloat16),
    "bf16 computes": MixedPrecision(torch.bfloat16, torch.bfloat16, gather="int8", reduce="int8"),
}


def _train(comm, stage, precision, *, num_micro=1, accumulate=None, **kwargs):
    zero = Zero(net(), stage, comm=comm, precision=precision, accumulate=accumulate, **kwargs)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = steps(zero, optimizer, range(2), num_micro)
    with zero.full_params():
        shown = {name: param.detach().clone() for name, param in zero.model.named_parameters()}
    return losses, zero.state_dict(), shown


def _ways_to_send():
    for wire, precision in WIRES.items():
        size = precision.node_size
        worlds = [(2 * size, None)] if size else [(2, None), (3, None), (4, 1), (4, 2)]
        yield from ((wire, *world, *rest) for world in worlds for rest in product(ACCUMULATE, (False, True)))


ACCUMULATE = (None, "local", "sharded")


@pytest.mark.redundant
@pytest.mark.pairwise("accumulate", "is_late")
@pytest.mark.parametrize(("wire", "world_size", "shard_size", "accumulate", "is_late"), list(_ways_to_send()))
def test_stages_have_the_same_bits_under_any_wire(wire, world_size, shard_size, accumulate, is_late):
    settings = {"num_micro": 1 if accumulate is None else 2, "accumulate": accumulate, "shard_size": shard_size}
    wrap = late if is_late else lambda comm: comm
    by_stage = [
        run_threads(lambda comm, stage=stage: _train(wrap(comm), stage, WIRES[wire], **settings), world_size)
        for stage in (1, 2, 3)
    ]
    for ranks in by_stage:
        assert all(torch.isfinite(loss) for loss, _ in ranks[0][0])
        assert same_bits(ranks, by_stage[0])
        assert all(torch.equal(ranks[0][2][name], each[2][name]) for each in ranks for name in each[2])


def test_an_optimizer_of_whole_tensors_begins_with_what_travels():
    """Its layout is made after the engine, whose weights at stages 1 and 2 have arrived by then."""

    def on_rank(comm, stage):
        zero = Zero(net().requires_grad_(False), stage, comm=comm, precision=INT8)
        matrices = [param.requires_grad_() for param in zero.model.parameters() if param.dim() == 2]
        optimizer = zero.optimizer(torch.optim.Muon, matrices, lr=1e-2)
        return steps(zero, optimizer, range(2)), zero.state_dict()

    first, *others = [run_threads(lambda comm, stage=stage: on_rank(comm, stage), 2) for stage in (1, 2, 3)]
    assert all(same_bits(ranks, first) for ranks in others)


def test_every_rank_computes_with_what_the_owners_shards_come_to_and_masters_stay_exact():
    def on_rank(comm):
        zero = Zero(net(), 2, comm=comm, precision=INT8)
        exact = zero.state_dict()
        return exact, {name: param.detach().clone() for name, param in zero.model.named_parameters()}

    original = net().state_dict()
    for exact, shown in run_threads(on_rank, 2):
        for name, weight in original.items():
            assert torch.equal(exact[name], weight)
            if weight.dim() < 2:
                assert torch.equal(shown[name], weight)
            else:
                assert not torch.equal(shown[name], weight)
                assert (shown[name] - weight).abs().max() <= weight.abs().max() / 127 / 2 * 1.01


@pytest.mark.redundant
def test_gradients_are_near_those_that_travel_as_they_are_and_right_in_the_mean():
    def grads(precision):
        def on_rank(comm):
            zero = Zero(net(), 2, comm=comm, precision=precision)
            total = None
            for _ in range(30):
                zero.model(batch(comm.rank, 0)).backward()
                found = torch.cat([g.reshape(-1) for g in zero.full_grads().values() if g is not None])
                total = found.double() if total is None else total + found
                zero.zero_grad()
            return found, total / 30

        return run_threads(on_rank, 2)[0]

    once, mean = grads(MixedPrecision(reduce="int8"))
    exact, _ = grads(None)
    assert (once - exact).norm() < 0.01 * exact.norm()
    assert (mean - exact).norm() < 0.3 * (once - exact).norm()


@pytest.mark.redundant(but=["1-int8"])
@pytest.mark.parametrize(("precision", "world_size"), [(INT8, 2), (_in_nodes(2), 4)], ids=["int8", "nodes"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_rounds_as_the_one_that_went_on(stage, precision, world_size, tmp_path):
    def on_rank(comm):
        zero = Zero(net(), stage, comm=comm, precision=precision, accumulate="sharded")
        optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        steps(zero, optimizer, range(3), 2)
        zero.model.blocks[1].requires_grad_(True)  # which no step has rounded gradients of
        checkpoint.save(tmp_path / "saved", zero, step=3)
        went_on = steps(zero, optimizer, range(3, 5), 2), zero.state_dict()
        other = Zero(net(), 2, comm=comm, precision=precision)
        optimizer = other.optimizer(torch.optim.AdamW, lr=1e-2)
        checkpoint.load(tmp_path / "saved", other)
        other.model.blocks[1].requires_grad_(True)
        return went_on, (steps(other, optimizer, range(3, 5), 2), other.state_dict())

    assert all(same_bits(*found) for found in run_threads(on_rank, world_size))


@pytest.mark.redundant
def test_nan_and_inf_are_still_seen_behind_the_wire():
    def on_rank(comm, bad):
        zero = Zero(net(), 3, comm=comm, precision=INT8)
        rows = batch(comm.rank, 0)
        if comm.rank == 1:
            rows[0, 0] = bad
        zero.model(rows).backward()
        return zero.clip_grad_norm_(1.0)

    for bad in (float("nan"), float("inf")):
        assert not any(norm.isfinite() for norm in run_threads(lambda comm, bad=bad: on_rank(comm, bad), 2))


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_written_into_weights_reaches_the_masters_and_the_rest_keeps_its_digits(stage):
    def on_rank(comm):
        zero = Zero(net(), stage, comm=comm, precision=INT8)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.0)
        with zero.full_params(write_back=True), torch.no_grad():
            zero.model.blocks[0][1].weight[3, 5] = 0.625
        if stage == 2:
            zero.model.embed.weight.data[1, 2] = 0.5  # between steps, and through .data
            optimizer.step()
        return zero.state_dict()

    original = net().state_dict()
    for state in run_threads(on_rank, 2):
        expected = copy.deepcopy(original)
        expected["blocks.0.1.weight"][3, 5] = 0.625
        if stage == 2:
            expected["embed.weight"][1, 2] = 0.5
        assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_modules_own_state_dict_is_refused_where_it_has_rounded_weights(stage):
    def on_rank(comm, precision, words):
        zero = Zero(net(), stage, comm=comm, precision=precision)
        with zero.full_params(), pytest.raises(RuntimeError, match=words) if words else nullcontext():
            zero.model.state_dict()
        with zero.full_params(), pytest.raises(RuntimeError, match=words) if words else nullcontext():
            zero.model.blocks[0][1].state_dict()  # a part of a unit
        with zero.full_params():
            zero.model.blocks[0][0].state_dict()  # a norm, which travels as it is
        return set(zero.state_dict())

    words = r"^model\.state_dict\(\): the compute weights are rounded .*use zero\.state_dict\(\)"
    for precision, refused in ((INT8, words), (MixedPrecision(gather=torch.float32, reduce="int8"), "")):
        names = run_threads(lambda comm, p=precision, w=refused: on_rank(comm, p, w), 2)[0]
        assert names == set(net().state_dict())


def _compiled_or_not(comm, precision, compiles):
    whole = net()
    zero = Zero(whole, stage=3, comm=comm, units=list(whole.blocks), precision=precision)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    model = torch.compile(zero.model, backend="eager") if compiles else zero.model
    losses = []
    for step in range(2):
        loss = model(batch(comm.rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.redundant
def test_a_compiled_model_quantises_what_it_did_uncompiled(gloo_ranks):
    """Its compiler does not go into what hooks quantise."""
    ranks = gloo_ranks(2)
    compiled, plain = (ranks.run(_compiled_or_not, INT8, each) for each in (True, False))
    assert compiled == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 10, (1 << 17) + 3])
def test_sums_of_bits_see_each_element_and_signs_that_change_together(dtype, numel):
    values = torch.randn(1 + numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    assert torch.equal(bit_sums(values[1:]), bit_sums(values[1:].clone()))  # wherever it lies
    values = values[1:]
    found = [bit_sums(values)]
    for place in sorted({0, numel // 2, numel - 1}):
        changed = values.clone()
        changed[place] *= -1
        found.append(bit_sums(changed))
    if numel > 1:
        for several, factor in ((slice(1, 6, 4), -1), (slice(0, 5, 4), -1), (slice(0, 8), -1), (slice(0, 8), 2)):
            changed = values.clone()
            changed[several] *= factor
            found.append(bit_sums(changed))
        found.append(bit_sums(values.flip(0)))
    assert len({tuple(sums.tolist()) for sums in found}) == len(found)


def test_bad_wires_are_named():
    comm = NullCommunicator(2)
    for bad in ("int3", torch.int8, 8):
        with pytest.raises(ValueError, match=r"^gather: .* is not a wire format; choose a floating-point"):
            MixedPrecision(gather=bad)
    with pytest.raises(ValueError, match=r"^reduce: 'int8-delta' is not a wire format"):
        MixedPrecision(reduce="int8-delta")
    with pytest.raises(ValueError, match=r"^block: blocks of 100 elements do not pack"):
        MixedPrecision(gather="int8", block=100)
    with pytest.raises(ValueError, match=r"^reduce: int8 is given, and stage 0 has no wire format"):
        Zero(net(), 0, comm=comm, precision=MixedPrecision(reduce="int8"))
    zero = Zero(net(), 1, comm=comm, precision=INT8)
    with pytest.raises(ValueError, match=r"^gather: .*stage 0 has no wire format"):
        zero.restage(0)

    engine = Zero(net(), 1, comm=NullCommunicator(2), precision=INT8)
    engine.comm.all_to_all = None
    with pytest.raises(ValueError, match=r"^comm: gradients cannot travel in a wire format over a NullCommunicator"):
        engine.model(batch(0, 0)).backward()


# -- over nodes: added up inside a node in full precision, quantised between nodes --------------------------------


def test_the_sum_is_of_sums_of_nodes_in_their_order():
    """In fp32 nothing is rounded on the way: the sum inside each node, then over nodes, and each rank's own part."""

    def grads(comm, rank, precision):
        zero = Zero(net(), 2, comm=comm, precision=precision)
        zero.model(batch(rank, 0)).backward()
        trained = {name: param.grad for name, param in zero.model.named_parameters() if param.requires_grad}
        return {name: grad.full_tensor() for name, grad in trained.items() if name.endswith(("1.weight", "3.weight"))}

    precision = MixedPrecision(reduce=torch.float32, node_size=2)
    found = run_threads(lambda comm: grads(comm, comm.rank, precision), 8)[0]
    parts = [grads(LocalCommunicator(), rank, MixedPrecision()) for rank in range(8)]
    assert found
    for name in found:
        a, b, c, d = (parts[rank][name] / 8 + parts[rank + 1][name] / 8 for rank in (0, 2, 4, 6))
        torch.testing.assert_close(found[name], ((a + b) + c) + d, rtol=2e-6, atol=4e-9)


def test_a_node_sends_its_sum_to_others_once():
    """Between nodes a rank sends its part of the node's sum alone; the sum inside a node is of the whole buffer."""

    def sent(node_size):
        observed = ObservedCommunicator(NullCommunicator(16, rank=5))
        precision = MixedPrecision(reduce="int8", node_size=node_size)
        zero = Zero(nn.Linear(512, 512, bias=False), 2, comm=observed, precision=precision)
        observed.drain()
        zero.model(torch.randn(1, 512)).sum().backward()
        return [(record.op, record.num_bytes) for record in observed.drain() if record.label.endswith("/grads")]

    packed = BlockFormat("int8", 256).num_bytes(512 * 512 // 16)
    assert sent(None) == [("all_to_all", 16 * packed)]
    assert sent(4) == [("reduce_scatter", 4 * 512 * 512), ("all_to_all", 4 * packed)]
