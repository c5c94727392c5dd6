"""Collect the results of a sweep, or of separately trained runs that a report compares."""

import contextlib
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scipy import stats

from transformer_jax.analysis.significance import count_different, p_value, paired_test
from transformer_jax.baselines.build import count_parameters
from transformer_jax.config import Row
from transformer_jax.config.architectures import uses
from transformer_jax.console import shell_command
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.errors import Setting, StorageError, TransformerJaxError, UsageError
from transformer_jax.evaluation.evaluation_files import read_translations
from transformer_jax.evaluation.scores import choose_tokenizer, sacrebleu_metrics
from transformer_jax.files import JsonObject, read_json_if_valid
from transformer_jax.reports.results import (
    BleuDifference,
    Results,
    RowResult,
    ScoredSplit,
    config_as_trained,
)
from transformer_jax.reports.seed_statistics import failed_seeds
from transformer_jax.runs.grouping import group_runs
from transformer_jax.runs.metrics_file import is_number, read_metrics
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps.plan import Sweep, SweepRun
from transformer_jax.sweeps.status import RunStatus, mark_unreadable, read_status, with_results


def collect_runs(paths: Sequence[Path], out: Path) -> Sweep:
    """Group existing runs into a sweep. Runs that differ only in their seed share a row."""
    is_sweep = (out / "sweep.json").exists()
    if is_sweep or (out.exists() and not (out / "report" / "table.csv").exists()):
        raise StorageError(
            f"{out} {'is a sweep' if is_sweep else 'exists but does not contain a report'}: "
            "choose another folder (",
            Setting("out", "FOLDER"),
            ")",
        )
    groups = group_runs([RunFolder.open(path) for path in paths])
    runs: list[SweepRun] = []
    for row, folders in groups.items():
        for folder in folders:
            seed = folder.config.train.seed
            if any((run.row, run.seed) == (row, seed) for run in runs):
                raise UsageError(f"{folder.path} has the same config and seed as another run")
            runs.append(SweepRun(folder.path, str(folder.path), row, seed, folder.config))
    rows = {
        row: Row(folders[0].config.change(train={"seed": 0})) for row, folders in groups.items()
    }
    return Sweep(out, rows, runs)


def read_adhoc_status(run: SweepRun) -> RunStatus:
    """Return a separately trained run's status, which is "done" if the run has been evaluated."""
    try:
        status = with_results(RunStatus(run), any_search=True)
        package = RunFolder.open(run.path).package
    except (OSError, StorageError) as error:
        return mark_unreadable(RunStatus(run), error)
    if not status.scores:
        command = shell_command("evaluate", run.path, "--split", "dev")
        return replace(status, status="stopped", note=f"not scored: {command}")
    # A packaged model does not contain metrics.
    done = status.step if package is None else package.steps[-1]
    status, steps = replace(status, step=done), run.config.train.steps
    notes = [f"has finished {done:,} of {steps:,} steps"] if done < steps else []
    notes += [
        f"was scored on {split} at step {step:,} of {done:,}"
        for split, scores in status.scores.items()
        if (step := scores.get("step", 0)) < done
    ]
    return replace(status, status="done", note=" and ".join(notes))


def read_adhoc_statuses(sweep: Sweep) -> list[RunStatus]:
    """Return the statuses of separately trained runs; raise UsageError if no run has scores."""
    statuses = [read_adhoc_status(run) for run in sweep.runs]
    if all(status.status != "done" for status in statuses):
        first = statuses[0]
        reason = first.note if first.status == "stopped" else first.summary
        raise UsageError(f"{first.run.path} is {reason}")
    return statuses


def collect_results(
    sweep: Sweep, statuses: Sequence[RunStatus], command: str, split: ScoredSplit | None = None
) -> Results:
    """Collect the results of all runs so far. Runs with invalid translations are unreadable."""
    statuses = [_check_translations(status) for status in statuses]
    if not any(status.status == "done" for status in statuses):
        bad = [f" ({s.run.name} is {s.summary})" for s in statuses if s.status == "unreadable"]
        nothing = "has finished, so there is nothing to report"
        raise UsageError(f"no run in {sweep.path} {nothing}{''.join(bad[:1])}")
    base_name, base = next(iter(sweep.rows.items()))
    by_row = {name: [s for s in statuses if s.run.row == name] for name in sweep.rows}
    base_digests = _digests(by_row[base_name])
    rows = {
        name: _collect_row(name, row, base, by_row[name], base_digests)
        for name, row in sweep.rows.items()
    }
    done = {name: [s for s in row.trained if s.status == "done"] for name, row in rows.items()}
    differences, signature = compare_test_bleu(bleu_tokenizer(base.config.data), done)
    trials = [read_status(run) for run in sweep.trials]
    if split == "test" and not any("test_bleu" in row.scores for row in rows.values()):
        raise UsageError(f"no run in {sweep.path} has been scored on the test set")
    return Results(sweep, rows, differences, signature, command, trials, split)


def _check_translations(status: RunStatus) -> RunStatus:
    """Return the status, marked as unreadable if the translations of an evaluation are invalid."""
    try:
        for folder in status.evaluations.values() if status.status == "done" else ():
            read_translations(folder)
    except StorageError as error:
        return mark_unreadable(status, error)
    return status


def _collect_row(
    name: str,
    row: Row,
    base: Row,
    statuses: Sequence[RunStatus],
    base_digests: Mapping[str, set[str]],
) -> RowResult:
    config = config_as_trained(statuses)
    model = row.config.model
    changes = [
        f"{key} {value}"
        for (section, key), (_, value) in base.config.differences(row.config).items()
        if (section, key) != ("train", "seed") and (section != "model" or uses(model, key))
    ]
    done = [status for status in statuses if status.status == "done"]
    metrics = [read_metrics(status.run.path / "metrics.jsonl") for status in done]
    unigram, failed = find_failed(done)
    return RowResult(
        name,
        ", ".join(changes),
        config,
        row.paper,
        count_parameters(config)["total"],
        _mean_flops(metrics),
        statuses,
        _collect_scores([status for status in done if status.run.seed not in failed]),
        unigram,
        failed,
        row.is_control,
        has_other_text=any(
            not digests <= known
            for key, digests in _digests(statuses).items()
            if (known := base_digests.get(key))
        ),
        step_seconds=_fastest_step(metrics),
    )


def find_failed(statuses: Sequence[RunStatus]) -> tuple[float | None, dict[int, float]]:
    """Find the runs of one row that failed to train.

    Args:
        statuses: the statuses of the row's finished runs.

    Returns:
        A unigram model's perplexity on the development set, if known, and the perplexities, keyed
        by seed, of the runs whose perplexity exceeds it or is not finite.
    """
    perplexities = _collect_scores(statuses).get("perplexity", {})
    unigram = _unigram_perplexity(statuses)
    return unigram, {seed: perplexities[seed] for seed in failed_seeds(perplexities, unigram)}


def _unigram_perplexity(statuses: Sequence[RunStatus]) -> float | None:
    for status in statuses:
        # Another program may have changed the files.
        with contextlib.suppress(TransformerJaxError, KeyError, OSError):
            _, references = read_translations(status.evaluations["dev"])
            tokenizer = RunFolder.open(status.run.path).vocabulary.target
            counts = Counter(itertools.chain.from_iterable(tokenizer.encode(references)))
            return math.exp(stats.entropy(list(counts.values())))
    return None


def _digests(statuses: Sequence[RunStatus]) -> dict[str, set[str]]:
    """Return the digests of the vocabularies and of each scored set, which determine its tokens."""
    digests: dict[str, set[str]] = {}
    for status in statuses:
        run = read_json_if_valid(status.run.path / "run.json")
        with contextlib.suppress(KeyError):
            vocabularies = run["vocabulary"], run.get("source_vocabulary")
            digests.setdefault("vocabulary", set()).add(str(vocabularies))
        for split, scores in status.scores.items():
            with contextlib.suppress(KeyError, TypeError):
                texts = scores["files"]["source.txt"], scores["files"]["reference.txt"]
                digests.setdefault(split, set()).add(str(texts))
    return digests


def _collect_scores(statuses: Sequence[RunStatus]) -> dict[str, dict[int, float]]:
    """Return the scores, keyed by name and seed. Values of unexpected types are ignored."""
    scores: dict[str, dict[int, float]] = {}
    for status in statuses:
        dev, test = status.scores.get("dev", {}), status.scores.get("test", {})
        values: dict[str, object] = {
            "perplexity": dev.get("perplexity"),
            "bleu": dev.get("bleu"),
            "test_perplexity": test.get("perplexity"),
            "test_bleu": test.get("bleu"),
            "brevity_penalty": test.get("brevity_penalty"),
            "precision": _precision(test),
            # Compound splitting requires words, so character-level BLEU has no compound score.
            "compound_bleu": test.get("compound_bleu"),
            "test_task": _main_score(test.get("task")),
        }
        for name, value in values.items():
            # The perplexity of a model on the test set can be too large to average.
            if is_number(value) and (name != "test_perplexity" or math.isfinite(value)):
                scores.setdefault(name, {})[status.run.seed] = float(value)
    return scores


def _precision(scores: JsonObject) -> float | None:
    """Return the geometric mean of the n-gram precisions, which is BLEU without its penalty."""
    bleu, penalty = scores.get("bleu"), scores.get("brevity_penalty")
    return bleu / penalty if is_number(bleu) and is_number(penalty) and penalty > 0 else None


def _main_score(task: object) -> object:
    """Return the main score from a task's stored result, or None if it is missing."""
    if not isinstance(task, dict) or not isinstance(name := task.get("main_score"), str):
        return None
    return task.get(name)


def _mean_flops(metrics: Sequence[Sequence[JsonObject]]) -> tuple[float, float] | None:
    """Return the mean FLOPs of training runs, both counted and estimated by the paper's method."""
    runs = [xs for reports in metrics if (xs := list(filter(_has_flops, reports)))]
    if not runs:
        return None
    counted = statistics.fmean(sum(x["flops"] for x in xs) for xs in runs)
    # Utilization is the ratio of counted FLOPs to peak FLOPs.
    return counted, statistics.fmean(sum(x["flops"] / x["utilization"] for x in xs) for xs in runs)


def step_seconds(times: Mapping[int, float]) -> float | None:
    """Return the duration of a training step, given the time of each report, keyed by step.

    It is the lower quartile over all intervals between reports, because the slower intervals can
    include evaluations, interruptions, and delays caused by other programs. With fewer than three
    intervals, the result is None, because their lower quartile would be an extrapolation.
    """
    steps = sorted(times)
    intervals = [(times[b] - times[a]) / (b - a) for a, b in itertools.pairwise(steps)]
    return statistics.quantiles(intervals, n=4)[0] if len(intervals) >= 3 else None


def _fastest_step(metrics: Sequence[Sequence[JsonObject]]) -> float | None:
    """Return the duration of a step in the fastest run, because other programs slow steps down."""
    timed = (
        [x for x in reports if x.get("split") == "train" and is_number(x.get("time"))]
        for reports in metrics
    )
    found = (step_seconds({x["step"]: x["time"] for x in reports}) for reports in timed)
    return min((x for x in found if x is not None), default=None)


def _has_flops(report: JsonObject) -> bool:
    return all(is_number(x) and x > 0 for x in (report.get("flops"), report.get("utilization")))


def compare_test_bleu(
    tokenizer: str, by_row: Mapping[str, Sequence[RunStatus]]
) -> tuple[dict[str, dict[int, BleuDifference]], str]:
    """Compare each run with the first row's run that has the same seed and references.

    Return the differences by row and seed, and the sacreBLEU signature or "".
    """
    base = next(iter(by_row))
    differences: dict[str, dict[int, BleuDifference]] = {}
    signature = ""
    for seed in sorted({status.run.seed for status in by_row[base]}):
        translations = {
            name: read_translations(status.evaluations["test"])
            for name, statuses in by_row.items()
            for status in statuses
            if status.run.seed == seed and "test" in status.evaluations
        }
        _, references = translations.get(base, ([], []))
        systems = [
            (name, lines) for name, (lines, target) in translations.items() if target == references
        ]
        if base not in translations or len(systems) < 2:
            continue
        bleu, _ = sacrebleu_metrics(choose_tokenizer(tokenizer, references), warn=False)
        signatures, results = paired_test(systems, {"BLEU": bleu}, references)
        signature = str(signatures["BLEU"])
        baseline, *others = results["BLEU"]
        for (name, lines), result in zip(systems[1:], others, strict=True):
            number = count_different(bleu, lines, systems[0][1], references)
            p = p_value(result, baseline, number)
            differences.setdefault(name, {})[seed] = BleuDifference(
                result.score - baseline.score, p
            )
    return differences, signature
