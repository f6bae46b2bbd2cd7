"""benchmarks/gpu without a GPU: rows at toy size, failures that lose themselves alone, the page of the results."""

import json
import os
import re
import statistics
import sys
from pathlib import Path

import pytest

import forked
from pairwise import cover
from soak import soaking
from zeroshard.kernels.launch import INTERPRETED

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks" / "gpu"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


def _run(*words, check=False, **env):
    command = [sys.executable, *map(str, words)]
    return forked.run(command, capture_output=True, text=True, check=check, env={**os.environ, **env})


def _quarter(out, *words):
    return _run(GPU / "quarter.py", "--rehearse", "--out", out, *words)


@pytest.fixture
def _gpu_modules(monkeypatch):
    monkeypatch.syspath_prepend(GPU)


def _records(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "results.jsonl"
    rows = ("right", "planted failure", "kernels right", "planted hang", "planted out of memory", "memory",
            "long sequences", "planted kill")  # fmt: skip
    done = _quarter(out, "--only", *rows)
    assert done.returncode == 0, done.stdout + out.with_suffix(".log").read_text()
    return out, done.stdout


def test_rows_that_fail_hang_run_out_of_memory_or_are_killed_lose_themselves_alone(rehearsal):
    out, told = rehearsal
    ends = {record["row"]: record["end"] for record in _records(out) if "end" in record}
    assert [row for row, end in ends.items() if end == "done"] == ["right", "kernels right", "memory", "long sequences"]
    assert "a planted failure" in ends["planted failure"]
    assert "longer than 4 s" in ends["planted hang"]
    assert "allocate" in ends["planted out of memory"]
    assert "status -9" in ends["planted kill"]
    assert {"row": "planted failure", "case": "before it fails"} in _records(out)
    assert "0 rows open" in told


def test_every_comparison_of_a_rehearsal_holds(rehearsal):
    out, _ = rehearsal
    compared = [record for record in _records(out) if "same" in record]
    assert [record for record in compared if not record["same"]] == []
    assert len([record for record in compared if record["row"] == "right"]) == 16
    operations = {"layer_norm", "rms_norm", "rope", "swiglu", "cross_entropy", "linear_cross_entropy", "adamw8bit"}
    assert operations <= {record["case"].split()[0] for record in compared}


# Planned over measured steps that are not within 10 %; the two rounds of the first were 9 % apart, and both copied the
# gradients of further micro-batches, as plans no longer do.
MISSED = {"qwen2.5-0.5b": 0.870, "qwen3-8b, 32768 tokens": 1.122}


@pytest.mark.usefixtures("_gpu_modules")
def test_plans_are_near_what_a_gpu_measured(tmp_path):
    """Peaks within 3 % and steps within 10 %, planned anew on this CPU for each committed case, but for `MISSED`; of
    the cases of peaks a cover of every pair of their settings, of long sequences one, and all with --soak."""
    from page import Found

    results, keys = tmp_path / "results.jsonl", ("model", "checkpointing", "stage", "world", "rows")

    def case_of(record):
        return tuple(record.get(key) for key in keys)

    measured = _records(max((GPU / "results").glob("*.jsonl")))
    cases = list(dict.fromkeys(case_of(r) for r in measured if r["row"] == "memory" and "peak_bytes" in r))
    assert len(cases) >= 24
    chosen = {*cases} if soaking() else {cases[place] for place in cover(cases)}
    later = () if soaking() else ("qwen3-8b, 16384 tokens", "qwen3-8b, 65536 tokens, in the memory for 65536")
    kept = [r for r in measured if r.get("case") not in later and (case_of(r) in chosen or case_of(r) not in cases)]
    results.write_text("".join(f"{json.dumps(record)}\n" for record in kept))
    _run(GPU / "page.py", "--results", results, "--plan", check=True)
    records = Found(_records(results)).records
    memory = [record for record in records if record["row"] == "memory"]
    peaks = {case_of(r): r["peak_bytes"] for r in memory if "peak_bytes" in r}
    planned = {case_of(r): r["planned_bytes"] for r in memory if "planned_bytes" in r}
    assert planned.keys() == peaks.keys() == chosen
    assert {case: peaks[case] / planned[case] for case in peaks if abs(peaks[case] / planned[case] - 1) > 0.03} == {}
    # What tensors ask for is what was planned; blocks that the allocator does not split are the rest of a peak. With a
    # world of one, the first case also makes workspaces of cuBLAS.
    asked = {case_of(r): r["requested_bytes"] for r in memory if "requested_bytes" in r}
    assert {case for case in asked if abs(asked[case] / planned[case] - 1) >= 1e-4 and case[3] > 1} == set()
    assert asked.keys() == chosen
    steps = {r["case"]: r["planned_s"] for r in records if "planned_s" in r}
    assert len(steps) == 7 - len(later)
    ratios = {}
    for case, step_s in steps.items():
        measured = statistics.median(r["step_s"] for r in records if r.get("case") == case and "step_s" in r)
        ratios[case] = step_s / measured
    assert {case: ratio for case, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == pytest.approx(
        MISSED, abs=0.005
    )


def test_peaks_are_the_planned_ones_and_the_page_shows_what_was_measured(rehearsal, tmp_path):
    out, _ = rehearsal
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    words = [GPU / "page.py", "--results", out, "--out", tmp_path / "gpu.md", "--readme", readme]
    for more in (["--plan"], [], ["--check"]):
        done = _run(*words, *more)
        assert done.returncode == 0, done.stderr
    records = [record for record in _records(out) if record["row"] == "memory"]
    keys = ("model", "checkpointing", "stage", "world", "rows")
    planned = {tuple(r[key] for key in keys): r["planned_bytes"] for r in records if "planned_bytes" in r}
    measured = {tuple(r[key] for key in keys): r["peak_bytes"] for r in records if "peak_bytes" in r}
    assert planned.keys() == measured.keys()
    assert len(planned) >= 2
    for case, num_bytes in measured.items():
        assert abs(planned[case] - num_bytes) <= 2048, case
    long = [record for record in _records(out) if record["row"] == "long sequences"]
    planned = {record["case"]: record["planned_bytes"] for record in long if "planned_bytes" in record}
    measured = {record["case"]: record["peak_bytes"] for record in long if "peak_bytes" in record}
    assert planned.keys() == measured.keys()
    assert {case: planned[case] - measured[case] for case in planned if abs(planned[case] - measured[case]) > 64} == {}
    assert len(planned) == 4
    page = (tmp_path / "gpu.md").read_text()
    assert "no figure claims anything" in page
    assert "| 16 of 16 |" in page
    assert "| planned 48 tokens for a card of 0.0 GiB; it took 64 tokens |" in page
    assert "not measured" in page
    assert "| 16 of 16 |" in readme.read_text()
    readme.write_text(readme.read_text().replace("16 of 16", "17 of 16"))
    stale = _run(*words, "--check")
    assert (stale.returncode, "run it" in stale.stderr) == (3, True)


def test_what_is_done_is_not_done_again_and_what_would_end_too_late_does_not_start(rehearsal, tmp_path):
    out, _ = rehearsal
    other = tmp_path / "second.jsonl"
    told = _quarter(other, "--only", "right", "norms", "--seconds", "30", "--done", str(out), str(tmp_path / "none"))
    assert told.returncode == 1
    assert re.search(r"^right +is done$", told.stdout, re.M)
    assert re.search(r"^norms +left for later: it needs 40 s of (30|29)$", told.stdout, re.M)
    assert not other.exists()


def test_a_page_of_a_file_that_is_not_there_is_an_error_in_a_line_and_the_committed_one_is_right(tmp_path):
    done = _run(GPU / "page.py", "--results", tmp_path / "none.jsonl", "--out", tmp_path / "gpu.md")
    assert done.returncode == 2
    assert re.fullmatch(r"error: --results: there is no .*none.jsonl; run quarter.py first\n", done.stderr)
    assert not (tmp_path / "gpu.md").exists()
    done = _run(GPU / "page.py", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("_gpu_modules")
def test_a_results_file_that_a_kill_cut_short_is_read_up_to_there(tmp_path):
    from quarter import is_done, read

    path = tmp_path / "cut.jsonl"
    path.write_text('{"row": "norms", "end": "done"}\n{"row": "norms", "begin": "x"}\n{"row": "loss", "en')
    assert len(read(path)) == 2
    assert is_done(read(path), "norms")
    assert not is_done(read(path), "loss")


def test_without_a_gpu_or_with_an_unknown_row_it_says_so_in_a_line(tmp_path):
    alone = _run(GPU / "quarter.py", "--out", tmp_path / "r.jsonl", CUDA_VISIBLE_DEVICES="")
    said = "error: no GPU: torch sees none here; add --rehearse for toy sizes\n"
    assert (alone.returncode, alone.stderr) == (2, said)
    unknown = _quarter(tmp_path / "r.jsonl", "--only", "norm")
    assert unknown.returncode == 2
    folder = _quarter(tmp_path)
    assert (folder.returncode, folder.stderr.startswith(f"error: --out: {tmp_path} is a folder; give")) == (2, True)
    assert unknown.stderr.startswith("error: --only: there is no row 'norm'; rows: gpt2 whole, stage 3, ")


@pytest.mark.usefixtures("_gpu_modules")
def test_the_commands_of_the_readme_are_short_and_name_what_is_there():
    text = (GPU / "README.md").read_text()
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", text, re.S) if "--seconds" in block]
    assert ["--seconds 480" in blocks[0], "--seconds 200" in blocks[1], len(blocks)] == [True, True, 2]
    assert all(len(block) < 2000 for block in blocks)
    from quarter import NEXT, ROWS

    assert ROWS[: len(NEXT)] == NEXT
    assert all(row.seconds < 60 for row in NEXT)
    assert sum(row.seconds for row in NEXT) <= 480
    assert sum(row.seconds for row in ROWS[len(NEXT) :]) <= 480
    assert all(row.limit_s >= 1.8 * row.seconds for row in ROWS)


def test_a_trace_gives_the_idle_share_of_the_busiest_stream_and_a_case_that_fails_loses_itself_alone(tmp_path):
    program = f"""
import sys, json
sys.path.insert(0, {str(GPU)!r})
import quarter, rows
from overlap import facts_of_trace
kernel = lambda stream, ts, dur: {{"cat": "kernel", "name": "k", "ts": ts, "dur": dur, "args": {{"stream": stream}}}}
call = lambda name, ts: {{"cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1}}
calls = [call("cudaLaunchKernel", 7), *(call("cudaDeviceSynchronize", ts) for ts in (6, 9, 11))]
events = [kernel(7, 0, 4), kernel(7, 2, 4), kernel(7, 8, 2), kernel(9, 0, 3), *calls, {{"ph": "M"}}]
print(json.dumps(facts_of_trace(events)))
say = quarter.Results(__import__("pathlib").Path({str(tmp_path / "r.jsonl")!r}), "memory")
peak = rows._peak_of_a_step
def failing(name, checkpointing, stage, *more):
    if stage == 3:
        raise RuntimeError("out of memory")
    return peak(name, checkpointing, stage, *more)
rows._peak_of_a_step = failing
rows.memory(rows.Budget(30), say)"""
    done = _run("-c", program, check=True, QUARTER_REHEARSES="1")
    facts = {"idle_share": pytest.approx(0.2), "num_streams": 2, "num_kernels": 4, "num_host_waits": 1, "num_reads": 0}
    assert json.loads(done.stdout.splitlines()[0]) == facts
    records = _records(tmp_path / "r.jsonl")
    assert next(record["failed"] for record in records if "failed" in record) == "RuntimeError: out of memory"
    assert {record["stage"] for record in records if "peak_bytes" in record} == {1}


def test_kernels_by_kind_and_the_blocks_that_are_live_at_the_peak():
    program = f"""
import sys, json
sys.path.insert(0, {str(GPU)!r})
from breakdown import kernels_of
from peaks import replayed
names = ("nvjet_sm90_tst", "void at::native::reduce_kernel<128>", "triton_poi_fused_add_0", "_loss_kernel")
events = [{{"cat": "kernel", "name": name, "dur": 1000 * (i + 1)}} for i, name in enumerate(names)]
print(json.dumps(kernels_of([*events, {{"cat": "cpu_op", "name": "aten::mm", "dur": 1}}])))
alloc = lambda address, size, line: {{"action": "alloc", "addr": address, "size": size, "frames": [
    {{"filename": "/a/loss.py", "line": line, "name": "chunk"}}, {{"filename": "x.cpp", "line": 1, "name": "c"}}]}}
free = lambda address, action="free_requested": {{"action": action, "addr": address, "size": 0}}
entries = [alloc(8, 30, 1), free(8), free(8, "free_completed"), alloc(16, 20, 2), free(4), alloc(8, 25, 3)]
print(json.dumps(replayed(entries, {{4: 10, 5: 1}})))"""
    done = _run("-c", program, check=True, QUARTER_REHEARSES="1")
    kinds, peak = map(json.loads, done.stdout.splitlines())
    by_kind = {"products": [1, 1.0], "sums": [1, 2.0], "compiled": [1, 3.0], "others": [1, 4.0]}
    assert (kinds["by_kind"], kinds["kernels_ms"]) == (by_kind, 10.0)
    num_bytes, live = peak
    assert num_bytes == 46
    assert live == {"5": [1, []], "16": [20, ["loss.py:2 chunk"]], "8": [25, ["loss.py:3 chunk"]]}
