"""Test that no damaged file silently changes what commands read from runs, packages, and sweeps."""

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_files import make_finished_sweep

from transformer_jax.config.loading import load_config
from transformer_jax.errors import TransformerJaxError
from transformer_jax.evaluation.evaluation_files import (
    read_evaluation_file,
    read_translations,
    save_evaluation,
)
from transformer_jax.files import read_json, write_json
from transformer_jax.inference.history import stored_evaluations
from transformer_jax.inference.trained_run import load
from transformer_jax.model.inspect import digest_params
from transformer_jax.reports.collect import collect_results
from transformer_jax.runs.metrics_file import format_report, read_metrics
from transformer_jax.sharing.model_card import find_scores
from transformer_jax.sharing.packaging import package_run
from transformer_jax.sweeps.plan import Sweep
from transformer_jax.sweeps.status import check_finished, read_status

TRIES = [1, pytest.param(20, marks=pytest.mark.exhaustive)]


def damage(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """Yield the contents with a bit flipped, with the end cut off, and with two lines swapped."""
    if content:
        place = rng.randrange(len(content))
        flipped = content[place] ^ 1 << rng.randrange(8)
        yield content[:place] + bytes([flipped]) + content[place + 1 :]
        yield content[:place]
    lines = content.splitlines(keepends=True)
    if len(lines) > 1:
        first, second = rng.sample(range(len(lines)), 2)
        lines[first], lines[second] = lines[second], lines[first]
        yield b"".join(lines)


def read_carefully(folder: Path, read: Callable[[Path], Any]) -> tuple[str, list[str], Any]:
    """Return the error message from `read` (or ""), its notes, and its result."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            result = read(folder)
        except TransformerJaxError as error:
            return str(error), [], None
    return "", [str(note.message) for note in notes], result


def check_damages(folder: Path, read: Callable[[Path], Any], tries: int) -> int:
    """Damage each file in a folder, and return how many cases of damage `read` notices.

    Fail if `read` returns a different result for damaged files without a note or an error.
    """
    expected, rng, noticed = read(folder), random.Random(tries), 0
    for path in sorted(x for x in folder.rglob("*") if x.is_file()):
        content = path.read_bytes()
        for damaged in [x for _ in range(tries) for x in damage(content, rng)]:
            is_cut = len(damaged) < len(content) or not damaged.endswith(b"\n")
            has_checkpoints = (path.parent / "checkpoints").exists()
            if path.name == "metrics.jsonl" and is_cut and not has_checkpoints:
                # Only a checkpoint contains the number of reports.
                continue
            path.write_bytes(damaged)
            error, notes, result = read_carefully(folder, read)
            assert result == expected or error or notes, (path, content, damaged)
            assert "\n" not in error
            noticed += bool(error or notes)
        path.write_bytes(content)
    return noticed


def read_run(path: Path) -> object:
    run = load(path)
    folders = sorted((path / "evaluations").glob("*"))
    return (
        digest_params(run.params),
        run.config,
        run.folder.versions,
        run.folder.environment,
        run.metrics,
        stored_evaluations(run.folder),
        find_scores(path, run.steps),
        [(read_translations(x), read_evaluation_file(x, "sentences.csv")) for x in folders],
    )


def read_sweep(path: Path) -> object:
    sweep = Sweep.open(path)
    results = collect_results(sweep, [read_status(run) for run in sweep.runs], "report")
    check_finished(results.statuses)
    # If a bit in the digest's name is flipped, the digest becomes a field that no code reads.
    scores = [
        {key: x for key, x in s.scores["dev"].items() if len(str(x)) != 64}
        for s in results.statuses
    ]
    statuses = [(s.status, s.finished, s.note, s.step) for s in results.statuses]
    rows = [(row.scores, row.config, row.flops, row.paper) for row in results.rows.values()]
    return statuses, scores, rows, [load_config(str(run.config_file)) for run in sweep.runs]


@pytest.mark.slow
@pytest.mark.parametrize("tries", TRIES)
def test_damage_to_a_run_or_a_package_is_noticed_or_harmless(
    whole_run: Path, tries: int, tmp_path: Path
) -> None:
    shutil.copytree(whole_run, tmp_path / "run")
    run = load(tmp_path / "run")
    save_evaluation(run, run.evaluate("dev", beam_size=1))
    package_run(run, tmp_path / "package")
    for name in ("run", "package"):
        assert check_damages(tmp_path / name, read_run, tries) > 10 * tries


@pytest.mark.parametrize("tries", TRIES)
def test_damage_to_a_sweep_is_noticed_or_harmless(tries: int, tmp_path: Path) -> None:
    folder = make_finished_sweep(tmp_path / "s", rows=["base", "worse"], splits=["dev"]).path
    # The helper writes files without digests.
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".state"):
            write_json(path, read_json(path))
        elif path.name == "metrics.jsonl":
            path.write_text("".join(map(format_report, read_metrics(path))), "utf-8")
    assert check_damages(folder, read_sweep, tries) > 10 * tries
