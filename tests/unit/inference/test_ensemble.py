"""Test runs that translate together."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_configs import SMALL, read_pairs, with_architecture
from models import SOURCE, TARGET, VOCABULARY, make_model
from oracles import drawn_params, transformer
from run_files import write_untrained_run

import transformer_jax as tj
from transformer_jax.cli import main
from transformer_jax.config import DecodeConfig
from transformer_jax.errors import UsageError
from transformer_jax.evaluation.evaluate import evaluate
from transformer_jax.files import read_json
from transformer_jax.inference.ensemble import EnsembleModel
from transformer_jax.inference.history import stored_evaluations
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.inference.translate import translate_batch
from transformer_jax.sharing.model_card import find_scores
from transformer_jax.special_tokens import EOS

SOURCES, TARGETS = (list(side[:3]) for side in zip(*read_pairs("dev"), strict=True))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, steps=(8,), scale=2.0).path)


def test_a_search_finds_what_an_exhaustive_search_with_mean_probabilities_finds() -> None:
    model, params = make_model()
    members = [params, drawn_params(model, SOURCE, TARGET, seed=1)]
    limit, others = 3, [token for token in range(VOCABULARY) if token != EOS]
    targets = [
        (*tokens, EOS) for n in range(limit) for tokens in itertools.product(others, repeat=n)
    ]
    padded = np.array([[*x, *[0] * (limit - len(x))] for x in targets])
    both = EnsembleModel(config=model.config, vocab_size=VOCABULARY, members=(model, model.clone()))
    config = DecodeConfig(beam_size=len(targets), max_extra_length=0, beam_end="any")
    joint = {f"members_{i}": x for i, x in enumerate(members)}
    best = translate_batch(both, config, 1, joint, np.asarray(SOURCE), np.array([limit] * 2))
    for i, source in enumerate(np.asarray(SOURCE)):
        rows = np.broadcast_to(source, (len(targets), len(source)))
        powers = [np.exp(transformer(x, rows, padded)) for x in members]
        mean = np.mean([x / x.sum(axis=-1, keepdims=True) for x in powers], axis=0)
        lengths = np.array([len(x) for x in targets])
        log_probs = np.log(np.take_along_axis(mean, padded[..., None], axis=-1)[..., 0])
        total = np.sum(log_probs, axis=1, where=np.arange(limit) < lengths[:, None])
        scores = total / ((5 + lengths) / 6) ** 0.6
        assert best.scores[i, 0] == pytest.approx(scores.max(), rel=1e-4)
        np.testing.assert_array_equal(best.tokens[i, 0, :limit], padded[scores.argmax()])


@pytest.mark.slow
def test_copies_of_a_run_translate_as_the_run_does(run: Run) -> None:
    copies = tj.ensemble([run, run])
    for [one], [other] in zip(
        copies.translate_best(SOURCES, 1), run.translate_best(SOURCES, 1), strict=True
    ):
        assert one.text == other.text
        assert one.score == pytest.approx(other.score, rel=1e-4)


def test_the_probability_of_a_token_is_the_mean_over_runs_of_any_architecture(
    run: Run, tmp_path: Path
) -> None:
    config = with_architecture("conv")
    conv = load(write_untrained_run(tmp_path / "conv", config, steps=(8,)).path)
    together = tj.ensemble([run, conv]).score(SOURCES, TARGETS)
    alone = (one.score(SOURCES, TARGETS) for one in (run, conv))
    for both, *each in zip(together, *alone, strict=True):
        expected = np.mean([np.exp(x.log_probs) for x in each], axis=0)
        np.testing.assert_allclose(np.exp(both.log_probs), expected, rtol=1e-3, atol=1e-7)


def test_runs_that_differ_in_their_vocabularies_are_rejected(run: Run, tmp_path: Path) -> None:
    config = SMALL.change(data={"vocab_size": 60})
    other = load(write_untrained_run(tmp_path / "other", config, steps=(8,)).path)
    with pytest.raises(UsageError, match=r"an ensemble: they differ in their vocabularies$"):
        tj.ensemble([run, other])
    with pytest.raises(UsageError, match="an ensemble needs at least one run"):
        tj.ensemble([])


def test_the_runs_of_an_ensemble_count_alike_in_another_ensemble(run: Run) -> None:
    assert tj.ensemble([run, tj.ensemble([run, run])]).members == (run,) * 3


def test_an_ensemble_refers_to_its_runs_for_what_is_inside_a_model(run: Run) -> None:
    both = tj.ensemble(iter([run, run]))
    for look in (
        lambda: both.attention("one"),
        lambda: both.hidden_states("one"),
        lambda: both.align(["one"], ["one"]),
        lambda: tj.head_importance(both),
        lambda: tj.plot_positions(both),
        lambda: both.metrics,
        lambda: both.plot_curves(),
        lambda: tj.compare([both]),
    ):
        with pytest.raises(UsageError, match="use the ensemble's runs one by one"):
            look()


def test_the_command_translates_with_several_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path
) -> None:
    text = tmp_path / "in.txt"
    text.write_text("".join(f"{line}\n" for line in SOURCES), "utf-8")
    other = write_untrained_run(tmp_path / "other", steps=(16,), scale=2.0).path
    with text.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["translate", str(run.folder.path), "--ensemble", str(other)]) == 0
        file.seek(0)
        alignments = ["--alignments", str(tmp_path / "alignments")]
        command = ["translate", str(run.folder.path), "--ensemble", str(other), *alignments]
        assert main(command) == 2
    expected = tj.ensemble([run, load(other)]).translate(SOURCES)
    # The second command fails before it prints a translation.
    assert capfd.readouterr().out.splitlines() == expected
    assert not (tmp_path / "alignments").exists()


def test_an_evaluation_has_the_scores_of_the_mean_probabilities_and_names_its_runs(
    run: Run, tmp_path: Path
) -> None:
    other = load(write_untrained_run(tmp_path / "other", steps=(16,), scale=2.0).path)
    both = tj.ensemble([run, other])
    evaluation = both.evaluate("dev", beam_size=1)
    lines = evaluation.sources, evaluation.references
    scores = (one.score(*lines) for one in (run, other))
    means = [
        np.mean([np.exp(x.log_probs) for x in pair], axis=0) for pair in zip(*scores, strict=True)
    ]
    perplexity = np.exp(-np.mean(np.log(np.concatenate(means))))
    assert evaluation.result["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert evaluation.hypotheses == both.translate(lines[0], beam_size=1)
    path = os.path.relpath(other.folder.path, run.folder.path)
    assert evaluation.result["members"] == [
        {"run": "run", "path": ".", "steps": [8]},
        {"run": "other", "path": path, "steps": [16]},
    ]
    with pytest.raises(UsageError, match="is an ensemble and has no separate checkpoints"):
        evaluate(both, "dev", {}, per_checkpoint=True)


@pytest.mark.slow
def test_the_command_stores_scores_of_an_ensemble_apart_from_those_of_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        write_untrained_run(tmp_path / f"seed-{i}", steps=(8 + i,), scale=2.0) for i in (0, 1)
    )
    command = ["evaluate", str(first.path), "--split", "dev", "--beam-size", "1"]
    assert main(command) == 0
    [own] = stored_evaluations(first)
    for others in ([second.path], [second.path, second.path], [second.path]):
        assert main([*command, "--ensemble", *map(str, others)]) == 0
        listed = ", ".join(["seed-0 (step 8)"] + ["seed-1 (step 9)"] * len(others))
        assert f"ensemble of {listed}" in capsys.readouterr().out
    # The third command replaces the scores that the first command stored.
    names = sorted(path.name for path in (first.path / "ensembles").iterdir())
    assert [name.rpartition("-")[0] for name in names] == [
        f"dev-step8-average1-beam1-alpha0.6-max-extra-length-8-of-{count}" for count in (2, 3)
    ]
    stored = read_json(first.path / "ensembles" / names[0] / "scores.json")
    assert [member["run"] for member in stored["members"]] == ["seed-0", "seed-1"]
    # Nothing that looks for scores of a run finds those of the ensemble.
    assert stored_evaluations(first) == [own]
    assert own["perplexity"] != stored["perplexity"]
    assert len(find_scores(first.path, [8])) == 1
    assert stored_evaluations(second) == []
    assert main([*command[:2], "--grid", "--ensemble", str(second.path)]) == 2
    assert "--grid cannot be combined with --ensemble" in capsys.readouterr().err
