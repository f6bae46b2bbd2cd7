"""Kernels of a compiled block, from the operations of its eager trace."""

import torch

from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.models import build_model
from zeroshard.zero import MixedPrecision

ROWS, SEQ_LEN, WIDTH = 2, 32, 32
SIZES = {"n_layer": 5, "n_head": 4, "n_embd": WIDTH, "n_kv_head": 2}  # a hidden width of 256 in the MLP
WEIGHT = 2 * WIDTH  # a norm's, in bf16


def _spans(device_type, **changes):
    with torch.device("meta"):
        model = build_model(
            "llama-tiny", vocab_size=97, seq_len=SEQ_LEN, overrides={**SIZES, **changes}, kernels="reference"
        )
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    return trace_language_model(model, ROWS, SEQ_LEN, precision, device_type=device_type).spans


def _of_a_block(spans, backward):
    """The work of the second block's forward or backward, up to its end."""
    own = [span for span in spans if span.event.unit == 1]
    begins = next(place for place, span in enumerate(own) if span.event.name == "pre_backward")
    return [work for span in (own[begins:] if backward else own[:begins]) for work in span.work]


def test_a_compiled_forward_reads_and_writes_once_what_lies_between_its_products():
    works = _of_a_block(_spans("compiled"), backward=False)
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
    works = _of_a_block(_spans("compiled"), backward=True)
    wide = 2 * ROWS * SEQ_LEN * 256
    assert next(work.num_bytes for work in works if not work.flops) == 5 * wide  # reads three, writes two gradients
    eager = _of_a_block(_spans("eager"), backward=True)
    assert sum(work.flops for work in works) == sum(work.flops for work in eager)
    assert len(works) < len(eager) / 2


def test_what_is_not_compiled_and_memory_are_as_before():
    compiled, eager = (_spans(device_type, activation_checkpointing="full") for device_type in ("compiled", "cuda"))
    assert [(s.event, s.kept, s.temporary, s.peak_kept, s.peak_temporary) for s in compiled] == [
        (s.event, s.kept, s.temporary, s.peak_kept, s.peak_temporary) for s in eager
    ]
    assert compiled[0].work == eager[0].work
    assert sum(len(span.work) for span in compiled) < sum(len(span.work) for span in eager)
