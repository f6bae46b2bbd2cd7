"""What left the package is named nowhere: not by its code, and so by neither --help nor completion, nor by a page."""

import re

from pages import ROOT

LEFT = [
    r"zeroshard\[lm-eval\]",
    r"run_tasks",
    r"--plot\b",
    r"(ask|--)[ -]?crossover",
    r"crossover[-_](low|filled)",
    r"lab tc",
    r"zeroshard lab\b",
    r"lab clean",
    r"many_hosts|ManyHosts|ForkServer|launch/rounds|ThreadTransport",
    r"time-to-loss\b",
    r"times_to_loss",
    r"timed[-_]steps",
    r"time_figures",
    r"liger_kernel",
    r"kernels liger",
    r"[Gg]eglu",
    r"stochastic_rounding=",
    r"sum_of_squares",
    r"FusedAdamW",
    r"cross_entropy\([^)]*inplace=",
    r"SavesPasses",
    r"[Dd]ashboard",
    r"\bwerkzeug\b",
    r"two_level",
    r"TwoLevel",
    r"grad_places",
    r"GradPlace",
    r"profiling[./]clock",
    r"benchmarks/(step|kernels|collectives|strategies|conformance|same_bits|footprint)\.py",
    r"\btyro\b",
    r"skip[-_]spikes",
    r"inside[-_](bandwidth|latency)",
    r"link[._]device\b",
    r"cursor_given_back",
    r"bench (memory|collectives|kernels)\b",
    r"doctor --environment",
    r"track\.(tags|mode)\b",
    r"int4-delta",
    r"common_copy",
    r"character_meta",
    r"logit_comparison",
    r"reading_notes",
    r"drawn side by side",
    r"MappedMeta",
    r"nanogpt_statements",
    r"json_lists",
    r"own_weights",
    r"all_gather_others",
    r"--(tensor|context|pipeline)-parallel",
    r"(tensor|context|pipeline)_parallel",
    r"optimizer[-_]in[-_]backward",
    r"plan_only",
    r"plan_cache",
    r"[Aa]dam[Ww]4bit",
    r"\bTPU",
    r"\btpu-",
    r"--rails",
    r"--oversubscription",
    r"--pod-nodes",
    r"no-master-weights",
    r"largest-model",
    r"dry[-_]run[-_]values",
    r"data/bulk",
    r"data/parts",
    r"fit[-_]memory",
    r"--remedies (none|int8)",
    r"sweep[./]remedies",
    r" --timeout-s\b",
    r"lowest_stage\.py",
    r"cannot_fit",
    r"overlap[-_]steps",
    r"(replicas|local_steps)[._]mixing",
    r"replicas=LocalSteps",
    r"--replicas\.",
    r"\[replicas\]",
    r"zero\.replicas\b",
    r"local_steps\.(anchors|meet)\b",
    r"\bmeetings?\b",
    r"at_anchor",
    r"\breplicas\.(every|outer_lr|outer_momentum|fragments|wire|anchors|meet)\b",
    r"outer_difference",
    r"buffers=.average.",
    r"\bleaves=|\+leaves|transport[./]leaves|check_leaves|Leaf(Sum|Reduce)",
    r"parallel[./]replica\b|zero[./]levels|\bLevels\.|import Levels|check_levels",
    r"too[-_]long=|--data.too-long",
    r"integrations[./]lightning|zeroshard\[lightning\]|import Lightning",
    r"zero_scope|scope_probe|current_scope|comm import .*\bscope\b",
]
# The history of the project may name it.
HISTORY = {"CHANGELOG.md", "log.md"}
SUFFIXES = {".py", ".md", ".toml", ".pyi", ".ipynb", ".sbatch", ".sh", ".yaml"}
FOLDERS = ("src", "docs", "examples", "benchmarks", "configs", "notebooks")


def test_what_left_is_named_nowhere():
    left = re.compile("|".join(LEFT))
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    files += [file for file in ROOT.iterdir() if file.suffix in SUFFIXES]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if file.name not in HISTORY
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if left.search(line)
    ]
    assert not found
