"""Compare the training time and translation quality of a finished sweep's architectures.

    python -m experiments.recurrence sweeps/recurrence

The command writes tables and a figure that show how long each architecture takes to reach a given
BLEU score on the development set, and how its BLEU score on the test set varies with sentence
length.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tyro.conf import Positional

from experiments.provenance import describe_sweep, select_trained
from experiments.sentences import Sentence, read_sentences
from transformer_jax.baselines.build import count_parameters
from transformer_jax.commands.arguments import parse_program
from transformer_jax.config import ModelConfig
from transformer_jax.console import run_and_report, stdout
from transformer_jax.data.corpora import bleu_tokenizer
from transformer_jax.errors import StorageError, UsageError, storage_errors
from transformer_jax.evaluation.evaluate import score_by_length
from transformer_jax.evaluation.perplexity import SentenceScore
from transformer_jax.evaluation.scores import choose_tokenizer, score
from transformer_jax.files import write_text
from transformer_jax.inference.history import metric_by_step, metrics_table
from transformer_jax.reports.collect import step_seconds
from transformer_jax.reports.footnotes import STATISTICS
from transformer_jax.reports.seed_statistics import format_mean
from transformer_jax.sweeps.plan import Sweep, SweepRun
from transformer_jax.sweeps.status import read_status
from transformer_jax.visualization.plots import Curve, average_runs, draw_curve
from transformer_jax.visualization.style import GRID, Picture, add_legend

# Few captions in Multi30k have more source tokens than this limit, so they form one bucket.
LONG = 30
# By default, the tables show the time to reach this BLEU score on the development set.
BLEU = 25.0
STATISTICS_NOTE = f"{STATISTICS} explains how to compare rows that have several random seeds."
Bucket = tuple[int, int | None]
"""The smallest and largest source length in a bucket, in tokens. None means no upper limit."""


@dataclass(frozen=True)
class RunScores:
    """The scores of one finished run."""

    seed: int
    dev_bleu: Mapping[int, float]
    """Greedy BLEU on the development set, keyed by step."""
    dev_perplexity: Mapping[int, float]
    """Perplexity on the development set, keyed by step."""
    step_seconds: float
    """The duration of a training step: the lower quartile over all intervals between reports."""
    test_bleu: float
    """BLEU on the test set, with the search settings in the config."""
    by_length: Mapping[Bucket, tuple[int, float]]
    """The number of test sentences and their BLEU score, keyed by bucket of source lengths."""


@dataclass(frozen=True)
class Row:
    """One architecture: a row in the sweep."""

    model: str
    """The model's description, such as "LSTM, no attention"."""
    parameters: int
    runs: Sequence[RunScores]

    @property
    def step_seconds(self) -> float:
        """The duration of a training step in the fastest run."""
        return min(run.step_seconds for run in self.runs)

    @property
    def learning_curve(self) -> Curve:
        """Development BLEU as a function of the training time in minutes, excluding evaluations."""
        curve = average_runs(self.model, [run.dev_bleu for run in self.runs])
        return curve._replace(x=curve.x * self.step_seconds / 60)

    def steps_to(self, bleu: float) -> int | None:
        """Return the first scored step at which the mean development BLEU reaches `bleu`."""
        curve = average_runs(self.model, [run.dev_bleu for run in self.runs])
        return next((int(x) for x, y in zip(curve.x, curve.y, strict=True) if y >= bleu), None)


def read_rows(sweep: Sweep) -> list[Row]:
    """Read the scores of all runs that trained successfully. Omit rows without such a run.

    Raises:
        UsageError: no run has trained, or the runs were scored on different sentences.
        StorageError: a run's files cannot be read or contain too few scores or reports.
    """
    trained, _ = select_trained([read_status(run) for run in sweep.runs])
    if not trained:
        raise UsageError(
            f"no run in {sweep.path} has trained successfully, so there is nothing to compare"
        )
    runs_by_row = {name: [x.run for x in trained if x.run.row == name] for name in sweep.rows}
    rows = [
        Row(
            describe(sweep.rows[name].config.model) + ", control" * sweep.rows[name].is_control,
            count_parameters(sweep.rows[name].config)["total"],
            [read_scores(run) for run in runs],
        )
        for name, runs in runs_by_row.items()
        if runs
    ]
    if len({tuple(run.by_length) for row in rows for run in row.runs}) > 1:
        raise UsageError(f"the runs in {sweep.path} were scored on different sentences")
    return rows


def describe(model: ModelConfig) -> str:
    """Return the model's name for tables and figures.

    An RNN's name includes its kind of attention.
    """
    if model.architecture == "rnn":
        score = model.attention_score.replace("none", "no")
        return f"{model.rnn_cell.upper()}, {score} attention"
    return {"transformer": "Transformer", "conv": "ConvS2S"}[model.architecture]


def read_scores(run: SweepRun) -> RunScores:
    """Read the scores of one run from its metrics and its evaluation of the test set.

    Raises:
        StorageError: a file cannot be read, or the run has no scores or too few reports.
    """
    table = metrics_table(run.path)
    dev_bleu = metric_by_step(table, "dev/bleu")
    seconds = step_seconds(metric_by_step(table, "train/time"))
    if not dev_bleu:
        raise StorageError(f"{run.path} has no BLEU scores: train it with train.bleu_every")
    if seconds is None:
        raise StorageError(f"{run.path} has too few reports: train it with a lower train.log_every")
    sentences = list(read_sentences(run, "test"))
    references = [sentence.reference for sentence in sentences]
    tokenizer = choose_tokenizer(bleu_tokenizer(run.config.data), references)
    return RunScores(
        seed=run.seed,
        dev_bleu=dev_bleu,
        dev_perplexity=metric_by_step(table, "dev/perplexity"),
        step_seconds=seconds,
        test_bleu=score(*_texts(sentences), tokenizer=tokenizer).bleu,
        by_length=_score_buckets(sentences, tokenizer),
    )


def _texts(sentences: Sequence[Sentence]) -> tuple[list[str], list[str]]:
    return [x.hypothesis for x in sentences], [x.reference for x in sentences]


def _score_buckets(
    sentences: Sequence[Sentence], tokenizer: str
) -> dict[Bucket, tuple[int, float]]:
    losses = [SentenceScore(x.source_tokens, x.target_tokens, x.nll) for x in sentences]
    buckets = score_by_length(*_texts(sentences), losses, tokenizer, last_bucket=LONG)
    return {(b["first"], b["last"]): (b["sentences"], b["bleu"]) for b in buckets}


def to_markdown(rows: Sequence[Row], bleu: float, provenance: str) -> str:
    """Return a table of scores and times, a table of BLEU by length, and notes.

    Two columns show the steps and minutes needed to reach a development BLEU of `bleu`.
    `provenance` is a Markdown list of additional notes about the runs.
    """
    columns = ("model", "parameters", "dev perplexity", "test BLEU", "ms per step")
    head = [*columns, f"steps to {bleu:g} BLEU", f"minutes to {bleu:g} BLEU"]
    table = [head, ["---"] * len(head), *(_summary(row, bleu) for row in rows)]
    buckets = rows[0].runs[0].by_length
    by_length = [["model", *(_describe(bucket, count) for bucket, (count, _) in buckets.items())]]
    by_length.append(["---"] * len(by_length[0]))
    for row in rows:
        scores = ([run.by_length[bucket][1] for run in row.runs] for bucket in buckets)
        by_length.append([row.model, *(format_mean(x, 1) for x in scores)])
    seeds = sorted({run.seed for row in rows for run in row.runs})
    names = ", ".join(map(str, seeds))
    has_deviations = any(len(row.runs) > 1 for row in rows)
    notes = [
        f"Random seeds: {names}; ± is the standard deviation over a row's seeds."
        if has_deviations
        else f"One random seed per row ({names}), so the table cannot rank models whose scores are "
        "close.",
        f"Steps to {bleu:g} BLEU: the first scored checkpoint whose BLEU on the development set, "
        "with greedy search, reaches this value.",
        "ms per step: the lower quartile over all intervals between reports, for the fastest seed, "
        "because other programs on the machine make steps slower. Minutes are steps multiplied by "
        "this duration, so they include neither evaluations nor compilation.",
        "The second table shows test BLEU by the number of source tokens, including EOS. Different "
        "columns contain different sentences, so compare rows rather than columns.",
    ]
    tables = ("\n".join(f"| {' | '.join(cells)} |" for cells in t) for t in (table, by_length))
    lines = [*(f"- {note}" for note in notes), *provenance.splitlines()]
    return "\n\n".join([*tables, "\n".join(lines)]) + "\n"


def _summary(row: Row, bleu: float) -> list[str]:
    perplexities = [run.dev_perplexity[max(run.dev_perplexity)] for run in row.runs]
    steps = row.steps_to(bleu)
    times = ["-", "-"] if steps is None else [f"{steps:,}", f"{steps * row.step_seconds / 60:.1f}"]
    return [
        row.model,
        f"{row.parameters:,}",
        format_mean(perplexities, 2),
        format_mean([run.test_bleu for run in row.runs], 1),
        f"{1000 * row.step_seconds:.0f}",
        *times,
    ]


def _describe(bucket: Bucket, count: int) -> str:
    first, last = bucket
    lengths = f"over {first - 1}" if last is None else f"{first} to {last}"
    return f"{lengths} tokens ({count})"


def to_csv(rows: Sequence[Row]) -> str:
    """Return the learning curves as CSV, with one line for each scored checkpoint."""
    lines = ["model,seed,step,dev_perplexity,dev_bleu"]
    for row in rows:
        for run in row.runs:
            lines += [
                f'"{row.model}",{run.seed},{step},{run.dev_perplexity[step]:.6g},{bleu:.6g}'
                for step, bleu in run.dev_bleu.items()
            ]
    return "\n".join([*lines, ""])


def draw_figure(rows: Sequence[Row]) -> Picture:
    """Plot the development BLEU against training time and the test BLEU against source length."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_time, by_length = figure.subplots(1, 2)
    buckets = rows[0].runs[0].by_length
    lines: list[Line2D] = []
    for number, row in enumerate(rows):
        lines.append(draw_curve(by_time, row.learning_curve, number))
        scores = [{i: run.by_length[b][1] for i, b in enumerate(buckets)} for run in row.runs]
        draw_curve(by_length, average_runs(row.model, scores), number)
    by_time.set(xlabel="minutes of training", ylabel="BLEU on the development set (greedy)")
    by_length.set(xlabel="source tokens (number of sentences)", ylabel="BLEU on the test set")
    labels = [
        f"{first}+\n({n})" if last is None else f"{first}-{last}\n({n})"
        for (first, last), (n, _) in buckets.items()
    ]
    by_length.set_xticks(range(len(buckets)), labels)
    for axes in (by_time, by_length):
        axes.grid(**GRID)
        axes.set_ylim(bottom=0)
    add_legend(by_time, lines)
    return Picture(figure)


def write_report(sweep: Positional[Path], out: Path | None = None, bleu: float = BLEU) -> None:
    """Write tables and a figure that compare the architectures of a finished sweep.

    Args:
        sweep: the sweep's folder.
        out: the folder for the files. Default: SWEEP/comparison.
        bleu: a BLEU score on the development set; the table shows the time to reach it.
    """
    runs = Sweep.open(sweep)
    rows = read_rows(runs)
    folder = out or sweep / "comparison"
    command = shlex.join(["python", "-m", "experiments.recurrence", str(sweep)])
    command += "" if bleu == BLEU else f" --bleu {bleu:g}"
    table = to_markdown(rows, bleu, describe_sweep(runs, command, STATISTICS_NOTE))
    with storage_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "table.md", table)
        write_text(folder / "curves.csv", to_csv(rows))
    picture = draw_figure(rows)
    for form in ("svg", "png"):
        picture.save(folder / f"comparison.{form}")
    stdout.print(table)
    stdout.print(f"saved in {folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Print any error as one line."""
    return run_and_report(
        lambda: parse_program("python -m experiments.recurrence", write_report, arguments)
    )


if __name__ == "__main__":
    sys.exit(main())
