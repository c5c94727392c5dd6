"""Compare how fast a run's model and its CTranslate2 exports translate the development set."""

from collections.abc import Sequence
from pathlib import Path

from experiments.benchmark.benchmarks import isolated_cache, select_names
from experiments.benchmark.measurements import Benchmark, summarize
from experiments.benchmark.rounds import Settings, run_rounds
from transformer_jax.errors import UsageError
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.sharing.ctranslate2_format import Quantization, export_ctranslate2
from transformer_jax.sharing.verify import dev_lines

QUANTIZATIONS: dict[str, Quantization] = {
    "ctranslate2": "float32",
    "ctranslate2-int8": "int8",
}
SERVERS = ("ours", *QUANTIZATIONS)


def serve(
    name: str,
    run_folder: Path,
    settings: Settings,
    *,
    beam_size: int,
    count: int = 64,
    only: str | None = None,
) -> Benchmark:
    """Compare translation speed on the development set, including tokenization and detokenization.

    All workers use the length penalty length^alpha, with the run's alpha. Each program has
    its own rule for ending a search. CTranslate2 applies one length limit to all lines, so its
    worker fails if a translation exceeds the limit for its line.

    Args:
        name: the name of the benchmark.
        run_folder: a run's folder; CTranslate2 must be able to represent the model.
        settings: the measurement settings.
        beam_size: the beam size; 1 means greedy search.
        count: the maximum number of lines to translate.
        only: a comma-separated list of workers.

    Raises:
        UsageError: the run's development set is not available, its text comes from TensorFlow
            Datasets, CTranslate2 cannot represent its model, or a worker's name is unknown.
    """
    names = select_names(only, SERVERS, SERVERS)
    run = load(run_folder)
    lines = read_lines(run, count)
    alpha = run.config.decode.length_penalty_alpha
    task = {"lines": lines, "beam_size": beam_size, "alpha": alpha}
    with isolated_cache(settings) as (inside, folder):
        specs = []
        for key in names:
            if key == "ours":
                own = {"run": str(run_folder.resolve()), **task}
                specs.append(inside.describe_worker(key, "tasks.serve", own))
                continue
            export_ctranslate2(run, folder / key, QUANTIZATIONS[key])
            export = {
                "folder": str(folder / key),
                "compute_type": QUANTIZATIONS[key],
                "limits": length_limits(run, lines),
                **task,
            }
            specs.append(inside.describe_worker(key, "peers.serve", export))
        rounds = run_rounds(specs, inside)
    work = {"run": run_folder.name, "beam_size": beam_size, "sentences": len(lines)}
    return summarize(rounds, name, unit="sentences", work=work, references=("ctranslate2",))


def read_lines(run: Run, count: int) -> list[str]:
    """Return up to `count` source lines from the development set.

    Raises:
        UsageError: the development set is not available, or comes from TensorFlow Datasets.
    """
    path = run.folder.path
    if run.config.data.corpus == "tfds":
        raise UsageError(
            f"the text of {path} comes from TensorFlow Datasets, which this benchmark does not "
            "read: use a run with a different corpus"
        )
    lines = dev_lines(run, count)
    if not lines:
        raise UsageError(
            f"the development set of {path} is not available: use a run whose text is here"
        )
    return lines


def length_limits(run: Run, lines: Sequence[str]) -> list[int]:
    """Return the maximum length of each line's translation, excluding EOS."""
    translator = run.translator()
    return [translator.limit(len(tokens)) - 1 for tokens in translator.encode(lines)]
