"""A report's notes: how the runs were trained, what the columns mean, and which caveats apply."""

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

from transformer_jax.config import Config, DataConfig, TrainConfig
from transformer_jax.data.splits import Split
from transformer_jax.files import read_json_if_valid
from transformer_jax.reports.answers import describe_margin, describe_reach
from transformer_jax.reports.results import MARGINS, Results, config_as_trained
from transformer_jax.reports.seed_statistics import (
    CONFIDENCE,
    describe_limits,
    format_p,
    rank_correlation,
    rank_correlation_interval,
    sign_agreement,
)
from transformer_jax.reports.tables import escape_markdown
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.status import RunStatus

STATISTICS = "docs/statistics.md"
ANALYSIS = f"{STATISTICS} of transformer-jax describes this analysis."


def list_footnotes(results: Results) -> list[str]:
    """Return notes that explain the tables, qualify the results, and list runs without scores."""
    return [
        *describe_experiment(results.sweep, results.statuses, results.splits[-1]),
        *describe_tuning(results.sweep),
        *_explain_columns(results),
        *_describe_dispersion(results),
        *_describe_agreement(results),
        *_list_reaches(results),
        *_list_caveats(results),
        *describe_missing(x for row in results.rows.values() for x in row.missing.items()),
        *list_origins(results.sweep, results.statuses, results.command),
    ]


def describe_experiment(
    sweep: Sweep, statuses: Sequence[RunStatus], split: Split | None = None
) -> list[str]:
    """Describe the first row's corpus, budget, and search options, and the other rows' budgets.

    The search options are those of the scores on `split`, or by default on the first stored split.
    """
    configs = [config_as_trained([s for s in statuses if s.run.row == row]) for row in sweep.rows]
    data, train = configs[0].data, configs[0].train
    steps = _list_others([f"{config.train.steps:,}" for config in configs])
    rates = [_describe_rate(config.train) for config in configs]
    # Separately trained runs may have been scored with search options other than those in their
    # configs.
    stored_scores = (item for status in statuses for item in status.scores.items())
    scores = next((x for name, x in stored_scores if split in (None, name)), {})
    stored, averaged = scores.get("decode"), scores.get("average_checkpoints")
    decode = asdict(configs[0].decode) | (stored if isinstance(stored, dict) else {})
    decode |= {} if averaged is None else {"average_checkpoints": averaged}
    search = ", ".join(f"{name} {value}" for name, value in decode.items())
    return [
        f"Corpus: {_describe_corpus(data)}, with {data.vocab_size:,} tokens in the vocabulary.",
        f"Budget: {train.steps:,} steps{steps} of about {data.batch_tokens:,} tokens each, with "
        f"{train.warmup_steps:,} steps of warmup and {rates[0]}{_list_others(rates)}.",
        f"Search: {search}.",
    ]


def describe_tuning(sweep: Sweep) -> list[str]:
    """Describe what was tuned and how often each value was chosen; warn about extreme values."""
    if (tuning := sweep.tuning) is None:
        # Runs that were trained separately have no origins, and may be part of tuned sweeps.
        if len(sweep.rows) == 1 or not sweep.origins:
            return []
        is_same = len({_list_rate_fields(row.config) for row in sweep.rows.values()}) == 1
        same = "all rows use the same learning rate and schedule"
        return [f"Not tuned for each row: {same if is_same else 'this sweep chose no values'}."]
    chosen = {row: value for row, value in tuning.chosen.items() if row in sweep.rows}
    counts = {value: list(chosen.values()).count(value) for value in tuning.values}
    seeds = ", ".join(map(str, tuning.seeds))
    times = ", ".join(f"{value} in {count} of {len(chosen)}" for value, count in counts.items())
    notes = [
        f"Tuned: {tuning.field}, in each row, by the mean log perplexity on the development set. "
        f"Each row has one trial for each combination of a value and a trial seed ({seeds}). "
        f"Chosen: {times} rows. The trials are not among the runs below."
    ]
    tuned = [name for name, row in sweep.rows.items() if not row.is_control]
    if names := [name for name in tuned if name not in chosen]:
        notes.append(
            f"Warning: no value has been chosen for these rows: {', '.join(names)}. Their runs, if "
            "there are any, may have another value."
        )
    numbers = [x for x in tuning.values if isinstance(x, int | float) and not isinstance(x, bool)]
    edges = {min(numbers), max(numbers)} if len(numbers) == len(tuning.values) else set()
    if names := [f"{row} ({value})" for row, value in chosen.items() if value in edges]:
        notes.append(
            f"Warning: these rows chose the lowest or the highest value of {tuning.field}, so a "
            f"value outside the list may be better: {', '.join(names)}."
        )
    return notes


def _list_rate_fields(config: Config) -> tuple[object, ...]:
    """Return the values that determine the learning rate at each step."""
    train = config.train
    has_fixed_peak = train.peak_learning_rate is not None and train.base_width is None
    width = None if has_fixed_peak else config.model.d_model
    decay = train.steps, train.decay_steps, train.decay_fraction
    peak = train.learning_rate_scale, train.peak_learning_rate, train.base_width, width
    return train.schedule, train.warmup_steps, *decay, *peak


def _describe_rate(train: TrainConfig) -> str:
    scale, peak = train.learning_rate_scale, train.peak_learning_rate
    factor = "" if scale == 1 else f"{scale:g} times "
    rate = f"{factor}the paper's learning rate" if peak is None else f"a peak rate of {peak:g}"
    names = {key: getattr(train, key) for key in ("schedule", "optimizer", "loss", "base_width")}
    others = [f"{key} {name}" for key, name in names.items() if name != getattr(TrainConfig, key)]
    return f"{rate}, {', '.join(others)}" if others else rate


def _list_others(values: Sequence[str]) -> str:
    """Return the values that differ from the first one, in parentheses, or "" if none differs."""
    others = dict.fromkeys(value for value in values if value != values[0])
    # A value can contain commas.
    return f" (other rows: {'; '.join(others)})" if others else ""


def _describe_corpus(data: DataConfig) -> str:
    match data.corpus:
        case "number_words":
            numbers, digits = data.max_numbers_per_line, data.max_digits
            per_line = "" if numbers == 1 else f", up to {numbers} numbers per line"
            per_number = "" if digits is None else f", up to {digits} digits per number"
            return f"number words, {data.num_pairs:,} pairs{per_line}{per_number}"
        case "text":
            return " and ".join(data.train or ())
        case "tfds":
            return f"{data.dataset} ({' to '.join(data.languages)})"
        case "trees":
            return "a treebank"
        case name:
            return name


def list_origins(sweep: Sweep, statuses: Sequence[RunStatus], command: str) -> list[str]:
    """List the commands and commits used to train the runs, and the command used for the report."""
    paths = [status.run.path for status in statuses]
    versions = [read_json_if_valid(path / "run.json").get("versions", {}) for path in paths]
    commits = {str(x["commit"]) for x in versions if isinstance(x, dict) and "commit" in x}
    # Runs may have been planned at one commit and trained at another.
    others = sorted(commits - {origin.commit for origin in sweep.origins})
    return [
        *(f"Trained by: {origin}" for origin in sweep.origins),
        *([f"Trained at commit {', '.join(others)}."] if others else []),
        f"Reported by: {command}",
    ]


def to_markdown_list(notes: Collection[str]) -> str:
    """Return notes as a Markdown list."""
    return "\n".join(f"- {escape_markdown(note)}" for note in notes)


def describe_missing(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """For each reason, return a note that lists the runs that have no scores for this reason.

    Args:
        reasons: the name of each run without scores, and the reason.
    """
    names = defaultdict[str, list[str]](list)
    for name, reason in reasons:
        names[reason].append(name)
    return [f"Missing: {', '.join(runs)}: {reason}" for reason, runs in names.items()]


def describe_failed(failed: Iterable[tuple[str, float, float | None]]) -> list[str]:
    """Return a note that lists the runs that failed to train, or no note if there are none.

    Args:
        failed: the name of each run, its perplexity on the development set, and that of a unigram
            model, if known.
    """
    runs = [
        f"{name} ({perplexity:.4g}" + (f"; a unigram model has {unigram:.4g})" if unigram else ")")
        for name, perplexity, unigram in failed
    ]
    text = "Failed to train and excluded from all means, with the perplexity on the development set"
    return [f"{text}: {', '.join(runs)}."] if runs else []


def _explain_columns(results: Results) -> list[str]:
    base, confidence = results.base.name, f"{CONFIDENCE:.0%}"
    notes = [
        "Perplexity is per token, without label smoothing. ± is the standard deviation over "
        "random seeds.",
        *_explain_paper(results),
        f"minus {base}: a row's mean minus that of {base}, in ln perplexity (+0.1 is about 10% "
        "higher perplexity) or BLEU, adjusted for seeds that only some of the rows have. The "
        f"brackets contain Dunnett's simultaneous {confidence} intervals, with seeds as blocks, "
        "which limit the probability of any false difference in one score's column. "
        f"Welch's {confidence} intervals use only two rows and do not limit it.",
    ]
    if any(row.is_control for row in results.rows.values()):
        notes.append(
            "A control's difference has Welch's interval, because its seeds are not those of the "
            "other rows. The analysis of the other rows does not use the control."
        )
    last = results.splits[-1]
    if any(results.verdict(name, score, last) for name in results.rows for score in MARGINS):
        notes.append(
            "verdict: 'as in the paper' if all differences in the interval have the paper's sign; "
            "if not, 'differs' if no difference in the interval both has that sign and exceeds a "
            f"margin; otherwise 'inconclusive'. The margin is {MARGINS['perplexity']} ln "
            f"perplexity or {MARGINS['bleu']} BLEU. The paper reports one score per row, so the "
            "verdict treats its differences as exact, although they also vary with the seed. If "
            "the paper's difference is within the margin, the verdict is 'as in the paper' if the "
            "whole interval lies within the margin, and 'differs' if the interval lies outside. "
            "'Out of reach' means that the interval is wider than twice the margin, so no "
            "difference could have been 'as in the paper'. It does not count against the paper."
        )
    if any("precision" in row.scores for row in results.rows.values()):
        notes.append(
            "test precision: the geometric mean of BLEU's n-gram precisions. test brevity: BLEU's "
            "penalty for translations that are too short. Their product is test BLEU."
        )
    if any("compound_bleu" in row.scores for row in results.rows.values()):
        notes.append(
            "compound-split: test BLEU as the paper's script computes it (Moses tokenization, "
            "words split at hyphens, no smoothing)."
        )
    if any("test_task" in row.scores for row in results.rows.values()):
        task = results.base.config.data.task
        notes.append(f"test task: the main score of the task {task}, in percent.")
    if results.signature:
        notes.append(
            f"test BLEU minus {results.base.name} by seed: the parentheses contain the p-value of "
            "sacreBLEU's approximate randomization over sentences, which is two-sided "
            f"({results.signature}). With 1,000 samples, its resolution is 0.001. It compares two "
            "trained models, not two methods, and is not corrected for the number of rows and "
            "seeds."
        )
    return [*notes, ANALYSIS]


def _explain_paper(results: Results) -> list[str]:
    notes = []
    papers = [row.paper for row in results.rows.values()]
    has_scores = any(paper.perplexity or paper.bleu for paper in papers)
    if has_scores:
        notes.append(
            "The paper's scores are on newstest2013, and ours are on the sets that the configs "
            f"name. Compare the differences from {results.base.name} with the paper's, not the "
            "scores themselves."
        )
    if any(row.flops for row in results.rows.values()):
        cost = "; the paper reports 3.3e18 for base and 2.3e19 for big (Table 2)"
        notes.append(
            "FLOPs: the floating-point operations of one training run, excluding padding. time x "
            "peak: the paper's estimate, training time (longer if other programs run) multiplied "
            f"by the peak FLOP/s of the devices{cost if has_scores else ''}. Runs that train in "
            "one program share its time equally."
        )
    if any(row.step_seconds for row in results.rows.values()):
        notes.append(
            "ms per step: the lower quartile over all intervals between reports, for the fastest "
            "run, because other programs on the machine make steps slower. Runs that train in one "
            "program have its time per step."
        )
    return notes


def _describe_agreement(results: Results) -> list[str]:
    """Return notes that compare the signs and the ranks of the differences with the paper's."""
    notes = []
    name = results.sweep.path.resolve().name
    for split in results.splits:
        for score, label in (("perplexity", f"{split} perplexity"), ("bleu", f"{split} BLEU")):
            differences = results.differences(score, split)
            same, worse, rows = sign_agreement(
                differences, MARGINS[score], lower_is_better=score == "perplexity"
            )
            if rows:
                notes.append(
                    f"In this report ({name}), the difference in {label} has the same sign as in "
                    f"the paper in {same} of the {rows} rows whose difference in the paper exceeds "
                    f"{describe_margin(score)}. For comparison, this number would be {worse} if "
                    f"every row were worse than {results.base.name}."
                )
            if (ranks := rank_correlation(differences)) is not None:
                interval = rank_correlation_interval(ranks[0], len(differences))
                limits = "" if interval is None else " [{:+.2f}, {:+.2f}]".format(*interval)
                notes.append(
                    f"Spearman's rank correlation with the paper's differences in {label} is "
                    f"{ranks[0]:+.2f}{limits} (p = {format_p(ranks[1])})."
                )
    return notes


def _describe_dispersion(results: Results) -> list[str]:
    """Return a note with the values that determine the width of the simultaneous intervals."""
    found = [
        f"{analysis.deviation:.3g} in {split} {'BLEU' if score == 'bleu' else 'ln perplexity'} "
        f"({analysis.freedom} degrees of freedom; c = {analysis.critical:.2f})"
        for split, analyses in results.analyses.items()
        for score, analysis in analyses.items()
        if analysis.deviation is not None
    ]
    if not found:
        return []
    return [
        f"Pooled standard deviations between seeds: {', '.join(found)}. The critical values c are "
        "those of the simultaneous intervals."
    ]


def _list_reaches(results: Results) -> list[str]:
    pairs = itertools.product(results.splits, MARGINS)
    return [x for split, score in pairs if (x := describe_reach(results, score, split))]


def _list_caveats(results: Results) -> list[str]:
    rows = results.rows.values()
    failed = (
        (f"{row.name}/seed-{seed}", perplexity, row.unigram)
        for row in rows
        for seed, perplexity in row.failed.items()
    )
    notes = describe_failed(failed)
    if len(results.rows) > 1:
        # List each limitation once, together with all scores that it applies to.
        limits = defaultdict[str, list[str]](list)
        for split, analyses in results.analyses.items():
            for score, analysis in analyses.items():
                for note in describe_limits(analysis):
                    limits[note].append(f"{split} {'BLEU' if score == 'bleu' else score}")
        every = sum(len(analyses) for analyses in results.analyses.values())
        for note, labels in limits.items():
            notes.append(note if len(labels) == every else f"{', '.join(labels)}: {note}")
    if names := [row.name for row in rows if row.has_other_text]:
        notes.append(
            "Rows whose vocabulary, development set, or test set differs from that of "
            f"{results.base.name}: {', '.join(names)}. Their perplexities per token cannot be "
            "compared."
        )
    searches = {
        json.dumps([scores.get("average_checkpoints"), scores.get("decode")])
        for status in results.statuses
        for scores in status.scores.values()
    }
    if len(searches) > 1:
        notes.append(
            "The runs were scored with different search options or different numbers of averaged "
            "checkpoints."
        )
    done = [status for status in results.statuses if status.status == "done"]
    steps = defaultdict[tuple[int, Split], set[int]](set)
    for status in done:
        for split, scores in status.scores.items():
            steps[status.run.config.train.steps, split].add(scores.get("step", 0))
    if different := set[int]().union(*(x for x in steps.values() if len(x) > 1)):
        notes.append(
            "The scores of runs with the same budget belong to different steps: "
            f"{', '.join(f'{step:,}' for step in sorted(different))}."
        )
    steps_of_runs = {s.run.name: {x.get("step", 0) for x in s.scores.values()} for s in done}
    if names_of_runs := [name for name, found in steps_of_runs.items() if len(found) > 1]:
        notes.append(
            "The scores of these runs on the development set and on the test set belong to "
            f"different steps: {', '.join(names_of_runs)}."
        )
    names = defaultdict[str, list[str]](list)
    for status in done:
        if status.note:
            names[status.note].append(status.run.name)
    return notes + [f"{', '.join(runs)}: {note}." for note, runs in names.items()]
