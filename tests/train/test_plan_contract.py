from dataclasses import replace

import pytest
import torch

from tiny_runs import summary_of, train_on
from zeroshard.comm import CONTROL, CommRecord, LocalCommunicator, run_threads
from zeroshard.host.errors import ExitStatus
from zeroshard.lab.planner.run_plan import predict
from zeroshard.train.records.plan_contract import EXCHANGED, Contract, Planned, Sent, message_difference

GATHER = Sent("all_gather", 32, "root/weights", 2)
REDUCE = Sent("reduce_scatter", 32, "root/grads", 2)
PLANNED = Planned({"params": 8, "grads": 4}, [GATHER, REDUCE], peak_bytes=100, step_s=0.5)


def _records(*sent):
    control = CommRecord("all_reduce", 1, CONTROL, 2)
    return [control, *(CommRecord(each.op, each.num_bytes, each.label, each.world_size) for each in sent), control]


def test_a_step_that_follows_another_is_held_to_the_plan():
    contract = Contract(PLANNED)
    contract.compare(1, _records(REDUCE), {}, taken=True)  # gathers nothing: there were no weights to refresh
    assert contract.num_checked == 0
    contract.compare(2, _records(GATHER, REDUCE), {"params": 8, "grads": 4}, taken=True)
    assert (contract.num_checked, contract.num_broken, contract.difference) == (1, 0, "")


def test_all_to_alls_of_sequences_have_an_order_of_their_own():
    exchange, longer = (Sent("all_to_all", num_bytes, EXCHANGED, 2) for num_bytes in (64, 96))
    for planned, broken in (([exchange, longer], 0), ([exchange], 1), ([longer, exchange], 1), (None, 0)):
        contract = Contract(replace(PLANNED, exchanges=planned))
        for step in (1, 2):
            sent = _records(GATHER, exchange, REDUCE, longer)
            contract.compare(step, sent, {"params": 8, "grads": 4}, taken=True)
        assert (contract.num_checked, contract.num_broken) == (1, broken), contract.difference
        assert ("all_to_all" in contract.report(None, None)["messages"]) == (planned is not None)


def test_a_step_after_an_evaluation_or_a_skipped_one_is_not():
    contract = Contract(PLANNED)
    contract.compare(1, [], {}, taken=True)
    contract.interrupt()
    contract.compare(2, [], {}, taken=True)
    contract.compare(3, [], {}, taken=False)
    contract.compare(4, [], {}, taken=True)
    assert contract.num_checked == 0
    contract.compare(5, [], {}, taken=True)
    assert contract.num_broken == 1


def test_the_first_difference_is_kept_and_later_ones_counted():
    contract = Contract(PLANNED)
    for step in range(1, 4):
        contract.compare(step, _records(GATHER, REDUCE), {"params": 8, "grads": step}, taken=True)
    assert contract.num_broken == 2
    assert contract.difference == "step 2: grads has 2 bytes resident, planned were 4"


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([GATHER, REDUCE], ""),
        ([GATHER, GATHER], "collective 1 is all_gather of 32 bytes for root/weights over 2 ranks, planned was reduce"),
        ([GATHER], "there were 1 collectives, planned were 2; missing: reduce_scatter of 32 bytes"),
        ([GATHER, REDUCE, REDUCE], "there were 3 collectives, planned were 2; beyond them: reduce_scatter"),
    ],
)
def test_a_message_that_differs_is_named(measured, said):
    found = message_difference(PLANNED.messages, measured)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_the_report_has_predicted_beside_measured():
    contract = Contract(PLANNED)
    for step in (1, 2):
        contract.compare(step, _records(GATHER, REDUCE), {"params": 8, "grads": 2}, taken=True)
    report = contract.report(peak_bytes=90, step_s=None)
    assert report["memory_bytes"]["grads"] == {"predicted": 4, "measured": 2, "ratio": 0.5}
    assert report["messages"]["all_gather"]["number"] == {"predicted": 1, "measured": 1, "ratio": 1.0}
    assert report["messages"]["reduce_scatter"]["bytes"]["measured"] == 32
    assert report["peak_bytes"]["ratio"] == 0.9
    assert report["step_s"] == {"predicted": 0.5, "measured": None, "ratio": None}
    assert Contract(PLANNED).report(None, None)["memory_bytes"]["params"]["measured"] is None


def test_the_line_has_bytes_messages_peak_and_time():
    planned = replace(PLANNED, memory_bytes={"params": 3 << 20, "master": 0}, peak_bytes=5 << 20)
    assert Contract(planned).line() == (
        "3.0MiB resident (params 3.0MiB), 2 collectives of 0.0MiB a step, peak 5.0MiB, 500.0 ms a step"
    )
    alone = replace(planned, messages=[each._replace(world_size=1) for each in planned.messages])
    assert Contract(alone).line() == "3.0MiB resident (params 3.0MiB), peak 5.0MiB, 500.0 ms a step"
    shared = replace(alone, comm_bytes=4 << 20, step_s=None)
    assert Contract(shared).line().endswith("peak 5.0MiB, buffers of communicators 4.0MiB")
    assert Contract(shared).report(None, None, 2 << 20)["comm_bytes"]["ratio"] == 0.5


# -- in a run ---------------------------------------------------------------------------------------------------


def _trained(comm, config, planner=predict):
    with torch.random.fork_rng():
        status, run = train_on(comm, config, predict=planner)
    return status, run.contract


CHANGES = [
    {"ema_decay": 0.9},
    {"reduce_dtype": "bfloat16", "prefetch": 2},
    {"grad_accum_steps": 2, "accumulate": "local"},
    {"optim": {"label_smoothing": 0.1, "z_loss": 1e-4}, "dtype": "bfloat16"},
    {"grad_accum_steps": 2, "accumulate": "sharded", "dtype": "bfloat16", "reduce_dtype": "bfloat16"},
]


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        *((f"zero{stage}", {}) for stage in range(4)),
        *(("zero2", each) for each in CHANGES),
        ("zero3", {"lora": {"rank": 2}, "base": {"format": "nf4", "double": True}, "dtype": "bfloat16"}),
    ],
)
def test_a_run_keeps_its_plan(tiny_config, strategy, changes):
    config = tiny_config(strategy=strategy, plan={"enforce": True}, max_steps=4, eval_interval=2, **changes)
    for status, contract in run_threads(lambda comm: _trained(comm, config), 2):
        assert status == ExitStatus.OK
        assert contract.difference == ""
        assert contract.num_checked == 2  # of 4: not the first, and not the one after the evaluation
    summary = summary_of(config.out)["plan"]
    assert summary["num_broken"] == 0
    assert summary["peak_bytes"]["predicted"] > sum(p["predicted"] for p in summary["memory_bytes"].values())
    assert all(pair["ratio"] in (1.0, None) for pair in summary["memory_bytes"].values())
    assert summary["step_s"]["measured"] > 0


def test_a_plan_that_is_not_kept_ends_the_run_where_it_is_enforced(tiny_config, capsys):
    def wrong_on_one_rank(job):
        planned = predict(job)
        held = {**planned.memory_bytes, "grads": planned.memory_bytes["grads"] + job.rank}
        return replace(planned, memory_bytes=held)

    config = tiny_config(strategy="zero2", plan={"enforce": True})
    found = run_threads(lambda comm: _trained(comm, config, wrong_on_one_rank), 2)
    assert [status for status, _ in found] == [ExitStatus.CHECK_FAILED] * 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith("error: plan: rank 1, step 2: grads has")
    assert summary_of(config.out)["status"] == "check_failed"


def test_elsewhere_it_is_only_reported(tiny_config):
    config = tiny_config()
    status, contract = _trained(LocalCommunicator(), config, lambda job: PLANNED)
    assert status == ExitStatus.OK
    assert contract.num_broken == contract.num_checked == 4  # not the first, and not the one after the evaluation
    assert summary_of(config.out)["plan"]["difference"].startswith("step 2: ")


def test_a_strategy_of_torchs_has_no_plan(tiny_config):
    assert _trained(LocalCommunicator(), tiny_config(strategy="ddp"))[1] is None
