"""Kernels and kept tensors of a compiled model, from the operations of its eager trace."""

import pytest
import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.models import build_model
from zeroshard.models.llama import rope_tables
from zeroshard.zero import MixedPrecision

ROWS, SEQ_LEN, WIDTH = 2, 32, 32
SIZES = {"n_layer": 5, "n_head": 4, "n_embd": WIDTH, "n_kv_head": 2}  # a hidden width of 256 in the MLP
WEIGHT = 2 * WIDTH  # a norm's, in bf16


def _model(name="llama-tiny", **changes):
    sizes = {**SIZES, "seq_len": SEQ_LEN, **changes}
    if name != "llama-tiny":
        del sizes["n_kv_head"]
    with torch.device("meta"):
        return build_model(name, vocab_size=97, overrides=sizes, kernels="reference")


def _spans(device_type, name="llama-tiny", autocast=None, **changes):
    precision = MixedPrecision(param_dtype=None if autocast else torch.bfloat16)
    how = {"device_type": device_type, "autocast": autocast}
    return trace_language_model(_model(name, **changes), ROWS, SEQ_LEN, precision, **how).spans


def _of_a_block(spans, backward):
    """The work of the second block's forward or backward, up to its end."""
    own = [span for span in spans if span.event.unit == 1]
    begins = next(place for place, span in enumerate(own) if span.event.name == "pre_backward")
    return [work for span in (own[begins:] if backward else own[:begins]) for work in span.work]


def test_a_compiled_forward_reads_and_writes_once_what_lies_between_its_products():
    works = _of_a_block(_spans("in pieces"), backward=False)
    rows = 2 * ROWS * SEQ_LEN  # bytes of a column in bf16
    x, query, key, wide = rows * WIDTH, rows * WIDTH, rows * WIDTH // 2, rows * 256
    angles = 2 * 2 * SEQ_LEN * 8
    moved = [work.num_bytes for work in works if not work.flops]
    assert moved == [
        x + WEIGHT + x,  # the first norm
        (query + key) * 2 + angles,  # rotary positions
        2 * x,  # attention's output in the order of the projection
        3 * x + x + WEIGHT,  # the residual sum and the second norm
        3 * wide,  # SwiGLU
        3 * x,  # the residual sum
    ]
    assert sum(bool(work.flops) for work in works) == 8


def test_a_compiled_backward_computes_again_what_forward_did_not_keep():
    works = _of_a_block(_spans("in pieces"), backward=True)
    wide = 2 * ROWS * SEQ_LEN * 256
    assert next(work.num_bytes for work in works if not work.flops) == 5 * wide  # reads three, writes two gradients
    eager = _of_a_block(_spans("eager"), backward=True)
    assert sum(work.flops for work in works) == sum(work.flops for work in eager)
    assert len(works) < len(eager) / 2


def test_one_graph_fuses_across_blocks_and_hands_over_gradients_at_its_end():
    whole, pieces = _spans("compiled"), _spans("in pieces")
    of_products = [[work for span in spans for work in span.work if work.flops] for spans in (whole, pieces)]
    assert of_products[0] == of_products[1]
    x = 2 * ROWS * SEQ_LEN * WIDTH
    between = [sum(work.num_bytes for span in spans for work in span.work) for spans in (whole, pieces)]
    assert between[1] - between[0] >= 4 * x  # at each of four ends of blocks, once
    assert whole[-1].event.name == pieces[-1].event.name == "backward_over"
    grads = sum(2 * param.numel() for param in _model().parameters())
    assert pieces[-1].temporary - whole[-1].temporary == grads
    assert sum(span.kept + span.temporary for span in whole) == sum(span.kept + span.temporary for span in pieces)


def _saved_bytes(name, autocast):
    """What torch's partitioner keeps of one block between forward and backward, its weights apart."""
    model, found = _model(name, n_layer=1), []

    def forward_of(graph, _):
        def run(*args):
            given = {arg.untyped_storage()._cdata for arg in args[1:]}
            results = graph(*args)
            kept = {
                r.untyped_storage()._cdata: r.untyped_storage().nbytes()
                for r in results[1:]
                if isinstance(r, torch.Tensor)
            }
            found.append(sum(num_bytes for storage, num_bytes in kept.items() if storage not in given))
            return results

        return run

    block, dtype = model.blocks[0], torch.float32 if autocast else torch.bfloat16
    names = [name for name, _ in block.named_parameters()]
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(param.shape, dtype=dtype)) for param in block.parameters()]
        x = torch.empty(ROWS, SEQ_LEN, WIDTH, dtype=dtype, requires_grad=True)
        beside = () if name == "gpt2-demo" else rope_tables(SEQ_LEN, 8, 1e4, torch.device("cpu"))
        inputs = (x, *beside)

        def call(*args):
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
                by_name = dict(zip(names, args[len(inputs) :], strict=True))
                return functional_call(block, by_name, args[: len(inputs)])

        how = {"partition_fn": min_cut_rematerialization_partition, "decompositions": select_decomp_table()}
        aot_function(call, forward_of, lambda graph, _: graph, **how)(*inputs, *params).sum().backward()
    return found[0]


@pytest.mark.redundant(but=["llama-tiny-None"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(
    ("name", "autocast"), [("gpt2-demo", None), ("gpt2-demo", torch.bfloat16), ("llama-tiny", None)]
)
def test_a_compiled_block_keeps_what_torchs_partitioner_keeps(name, autocast):
    spans = _spans("compiled", name, autocast)
    own = [span for span in spans if span.event.unit == 2]
    begins = next(place for place, span in enumerate(own) if span.event.name == "pre_backward")
    planned = sum(span.kept for span in own[:begins])
    assert planned == pytest.approx(
        _saved_bytes(name, autocast), rel=0.04
    )  # which keeps the smaller of a sum and its term
