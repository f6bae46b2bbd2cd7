"""What left the package is named nowhere: not by its code, and so by neither --help nor completion, nor by a page."""

import re

from pages import ROOT

LEFT = [
    r"zeroshard\[lm-eval\]|run_tasks|--plot\b|(ask|--)[ -]?crossover|crossover[-_](low|filled)|lab tc",
    r"zeroshard lab\b|lab clean|many_hosts|ManyHosts|ForkServer|launch/rounds|ThreadTransport|time-to-loss\b",
    r"times_to_loss|timed[-_]steps|time_figures|liger_kernel|kernels liger|[Gg]eglu|stochastic_rounding=",
    r"sum_of_squares|FusedAdamW|cross_entropy\([^)]*inplace=|SavesPasses|[Dd]ashboard|\bwerkzeug\b|two_level",
    r"TwoLevel|grad_places|GradPlace|profiling[./]clock",
    r"benchmarks/(step|kernels|collectives|strategies|conformance|same_bits|footprint)\.py|\btyro\b|skip[-_]spikes",
    r"inside[-_](bandwidth|latency)|link[._]device\b|cursor_given_back|bench (memory|collectives|kernels)\b",
    r"doctor --environment|track\.(tags|mode)\b|int4-delta|common_copy|character_meta|logit_comparison",
    r"reading_notes|drawn side by side|MappedMeta|nanogpt_statements|json_lists|own_weights|all_gather_others",
    r"--(tensor|context|pipeline)-parallel|(tensor|context|pipeline)_parallel|optimizer[-_]in[-_]backward|plan_only",
    r"plan_cache|[Aa]dam[Ww]4bit|\bTPU|\btpu-|--rails|--oversubscription|--pod-nodes|no-master-weights",
    r"largest-model|dry[-_]run[-_]values|data/bulk|data/parts|fit[-_]memory|--remedies (none|int8)",
    r"sweep[./]remedies| --timeout-s\b|lowest_stage\.py|cannot_fit|overlap[-_]steps",
    r"(replicas|local_steps)[._]mixing|replicas=LocalSteps|--replicas\.|\[replicas\]|zero\.replicas\b",
    r"local_steps\.(anchors|meet)\b|\bmeetings?\b|at_anchor",
    r"\breplicas\.(every|outer_lr|outer_momentum|fragments|wire|anchors|meet)\b|outer_difference|buffers=.average.",
    r"\bleaves=|\+leaves|transport[./]leaves|check_leaves|Leaf(Sum|Reduce)",
    r"parallel[./]replica\b|zero[./]levels|\bLevels\.|import Levels|check_levels|too[-_]long=|--data.too-long",
    r"integrations[./]lightning|zeroshard\[lightning\]|import Lightning",
    r"zero_scope|scope_probe|current_scope|comm import .*\bscope\b",
    r"data[./]mixing\b|--data[.]mix\b|data\.mix\b|\[data\.mix\]",
    r"--dtype fp8|(models|predict)[./]float8",
    r"profile[._]overlap|profiling[./]overlap|overlap_s_per_step|add_done_callback|trace/trace\.json|clock_offsets",
    r"plan .*--dry-run|predict[./]dry_run|lowest[-_]bandwidth|plan .*--compile\b|memory_points_bytes|allocator_bytes",
    r"largest[-_]micro[-_]batch|early[-_]stop\b",
    r"TinyShakespeare|--data tinyshakespeare|--ask remedy|planner[./]remedy|doctor --optimizers",
    r"import-config nanogpt|interop[./](nanogpt|migration)\b",
    r"reach_probe|[Tt]iles[_ ]as[_ ][Rr]anks|TilesAsRanks|tiles are ranks",
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
