import itertools
import math

import pytest
import torch
from torch import nn

from models.conftest import CONFIGS
from zeroshard.host.errors import UserError
from zeroshard.models import materialize, next_token_loss
from zeroshard.models.base import DRAWN_AT_ONCE, Part, fill_normal_


def test_loss_is_the_mean_over_positions_that_have_a_target():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 3], [-100, 0, 6]])
    log_probs = logits.log_softmax(-1)
    wanted = -(log_probs[0, 0, 1] + log_probs[0, 2, 3] + log_probs[1, 1, 0] + log_probs[1, 2, 6]) / 4
    torch.testing.assert_close(next_token_loss(logits, targets), wanted)


@pytest.mark.parametrize(
    ("dtype", "loss_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_is_taken_in_at_least_fp32(dtype, loss_dtype):
    loss = next_token_loss(torch.zeros(1, 2, 5, dtype=dtype), torch.tensor([[1, 2]]))
    assert (loss.dtype, loss.shape) == (loss_dtype, ())
    assert loss.item() == pytest.approx(math.log(5), abs=1e-6)


def test_logits_and_loss_agree(config, build, batch):
    model = build(config)
    tokens, targets = batch
    logits = model(tokens)
    assert logits.shape == (3, 10, config.vocab_size)
    torch.testing.assert_close(next_token_loss(logits, targets), model(tokens, targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_parameter_are_those_of_the_whole(dtype):
    """Wherever they begin and end, also across what one generator draws."""
    numel = 2 * DRAWN_AT_ONCE + 1000
    whole = torch.empty(numel, dtype=dtype)
    fill_normal_(whole, 0.02, 7, "a.weight")
    assert torch.unique(whole[:100]).numel() > 90
    assert not torch.equal(whole[:1000], whole[DRAWN_AT_ONCE:][:1000])
    table = torch.empty(numel // 8, 8, dtype=dtype)
    fill_normal_(table, 0.02, 7, "a.weight")
    assert torch.equal(table.view(-1), whole)
    fill_normal_(turned := torch.empty(8, numel // 8, dtype=dtype).t(), 0.02, 7, "a.weight")
    assert torch.equal(turned, table)
    cuts = [0, 1, 17, DRAWN_AT_ONCE - 3, DRAWN_AT_ONCE, DRAWN_AT_ONCE + 5, 2 * DRAWN_AT_ONCE + 999, numel]
    for start, stop in itertools.combinations(cuts, 2):
        part = torch.empty(stop - start, dtype=dtype)
        fill_normal_(part, 0.02, 7, "a.weight", Part(start, numel))
        assert torch.equal(part, whole[start:stop]), (start, stop)


def test_materialize_gives_the_whole_model_and_keeps_ties(config, build, batch):
    with torch.device("meta"):
        model = build(config, seed=3)
    materialize(model, "cpu")
    assert torch.equal(model(*batch), build(config, seed=3)(*batch))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    num_tied = len(names) - len(list(model.parameters()))
    assert num_tied == (1 if getattr(config, "tie_embeddings", True) else 0)  # GPT-2 is always tied


def test_initial_values_follow_seed_and_name(config, build):
    model = build(config)
    name = next(n for n, _ in model.named_parameters() if n.startswith("blocks.0") and "proj.weight" in n)
    drawn = {}
    for key in ((0, name), (1, name), (0, name.replace("blocks.0", "blocks.1"))):
        drawn[key] = torch.empty_like(model.get_parameter(name))
        model.init_parameter(key[1], drawn[key], seed=key[0])
    values = list(drawn.values())
    assert torch.equal(values[0], model.get_parameter(name))
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


@pytest.mark.redundant
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.soak), "llama-tied"])
def test_the_compiled_model_is_one_graph_with_the_same_result(name, build, batch):
    model = build(CONFIGS[name])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*batch), model(*batch))


@pytest.mark.redundant
def test_matrix_flops_equal_those_that_torch_counts(config, build, batch):
    from torch.utils.flop_counter import FlopCounterMode

    model, (tokens, targets) = build(config), batch
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets).backward()
    per_op = counter.get_flop_counts()["Global"]
    matrices = sum(flops for op, flops in per_op.items() if "mm" in str(op))
    looked_up = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    head = config.vocab_size * config.n_embd
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    multiplied = sum(p.numel() for p in model.parameters() if p.ndim == 2) - looked_up
    multiplied += head if model.lm_head.weight is next(model.parameters()) else 0
    # norms and biases are in N by convention, though no matrix product does their work
    assert model.num_multiplied_params == multiplied + vectors
    assert matrices == 6 * multiplied * tokens.numel()


@pytest.mark.parametrize("seq_len", [0, 13])
def test_check_seq_len_refuses_what_the_model_has_no_room_for(config, build, seq_len):
    with pytest.raises(UserError, match=rf"^seq_len: {seq_len} is .*; "):
        build(config).check_seq_len(seq_len)
