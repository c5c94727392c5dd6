import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from rich.console import Console
from small import SMALL

import transformer_jax
from transformer_jax.cli import main
from transformer_jax.data.prepare import prepare
from transformer_jax.errors import ConfigError, DataError, UsageError
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.inference.translate import ROWS, Hypothesis, Translator, search
from transformer_jax.model.build import POSITION_SCHEMES, build_transformer
from transformer_jax.model.transformer import init_params
from transformer_jax.special_tokens import EOS
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training

Translate = Callable[..., list[list[Hypothesis]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has learned a little: its translations are wrong, and unlike."""
    path = tmp_path_factory.mktemp("runs") / "run"
    quiet = Console(quiet=True)
    config = SMALL.change(
        model={"d_model": 32},
        train={"steps": 200, "warmup_steps": 100, "checkpoint_every": 100, "log_every": 100},
    )
    run_training(create_run(config, path, quiet), quiet)
    return load(path)


@pytest.fixture(scope="module")
def lines(run: Run) -> list[str]:
    sources, _ = prepare(run.config.data, run.vocabulary).lines("dev")
    return sources[:70]


def test_a_translation_depends_on_its_sentence_alone(run: Run, lines: list[str]) -> None:
    together = run.translate_best(lines, 2)
    alone = [run.translate_best([line], 2)[0] for line in lines[::9]]
    order = np.random.default_rng(0).permutation(len(lines))
    shuffled = run.translate_best([lines[i] for i in order], 2)
    for found, expected in [
        *zip(alone, together[::9], strict=True),
        *((shuffled[place], together[i]) for place, i in enumerate(order)),
    ]:
        assert [h.text for h in found] == [h.text for h in expected]
        np.testing.assert_allclose([h.score for h in found], [h.score for h in expected], rtol=1e-5)
    assert len({best[0].text for best in together}) > 10  # so the test can fail


def test_one_line_out_for_each_line_in_empties_included(run: Run, lines: list[str]) -> None:
    mixed = ["", lines[0], "   ", lines[1], ""]
    found = run.translate(mixed)
    assert [bool(text) for text in found] == [False, True, False, True, False]
    assert found[1::2] == run.translate(lines[:2])
    assert run.translate([]) == []


def test_the_best_come_first_and_are_distinct(run: Run, lines: list[str]) -> None:
    for best in run.translate_best(lines[:10], 4):
        scores = [hypothesis.score for hypothesis in best]
        assert scores == sorted(scores, reverse=True)
        assert len(best) == 4
    # What is asked for changes nothing of the best one.
    assert [best[0].text for best in run.translate_best(lines[:10], 4)] == run.translate(lines[:10])


def test_a_wider_beam_finds_no_worse_scores(run: Run, lines: list[str]) -> None:
    narrow = [best[0].score for best in run.translate_best(lines[:30], 1, beam_size=2)]
    wide = [best[0].score for best in run.translate_best(lines[:30], 1, beam_size=12)]
    assert np.mean(wide) > np.mean(narrow)


def test_scores_are_the_models_own_log_probabilities(run: Run, lines: list[str]) -> None:
    source = np.zeros((ROWS, 64), np.int32)
    pieces = run.vocabulary.source.encode(lines[:ROWS])
    for row, sentence in zip(source, pieces, strict=True):
        row[: len(sentence)] = sentence
    limit = np.array([len(sentence) + 50 for sentence in pieces])
    found = search(run.model, run.config.decode, 2, run.params, source, limit)
    for rank in (0, 1):
        target = found.pieces[:, rank]
        logits: Any = run.model.apply({"params": run.params}, jax.numpy.asarray(source), target)
        log_probs = jax.nn.log_softmax(logits)
        chosen = np.take_along_axis(np.asarray(log_probs), np.asarray(target)[..., None], 2)[..., 0]
        lengths = np.sum(target != 0, axis=1)
        expected = np.sum(chosen, axis=1, where=target != 0) / ((5 + lengths) / 6) ** 0.6
        np.testing.assert_allclose(found.scores[:, rank], expected, rtol=1e-4)


def test_a_line_that_is_too_long_is_named(run: Run, lines: list[str]) -> None:
    long = " ".join(["one"] * 200)
    with pytest.raises(DataError, match=r"line 3 has \d+ pieces, and the model reads 64"):
        run.translate([lines[0], "", long])
    assert len(run.translate([lines[0], "", long], truncate=True)) == 3


def test_the_model_reads_in_translation_what_it_read_in_training(
    run: Run, lines: list[str]
) -> None:
    prepared = prepare(run.config.data, run.vocabulary)
    sources, _ = prepared.tokens("dev")
    trained = [pieces.tolist() for pieces in np.split(sources.flat, sources.offsets[1:-1])]
    assert run.translator().encode(prepared.lines("dev")[0]) == trained
    assert all(pieces.count(EOS) == 1 for pieces in run.translator().encode(lines))


def test_truncation_keeps_the_beginning_and_the_end_piece(run: Run) -> None:
    [pieces] = run.translator().encode([" ".join(["one"] * 200)], truncate=True)
    assert len(pieces) == 64
    assert pieces[-1] == EOS


def test_a_width_is_compiled_once(run: Run, lines: list[str]) -> None:
    unlike_others = dataclasses.replace(run.config.decode, beam_size=3)
    cache_size = cast(Any, search)._cache_size
    before = cache_size()
    for part in (lines[:40], lines[40:]):
        translator = Translator(run.model, run.vocabulary, unlike_others)
        translator.translate(run.params, part)
    widths = {translator.width(len(p)) for p in translator.encode(lines)}
    assert cache_size() - before == len(widths)


def test_more_lines_than_rows_come_back_in_order(run: Run, lines: list[str]) -> None:
    assert len(lines) > 2 * ROWS
    assert run.translate(lines) == [run.translate([line])[0] for line in lines]


@pytest.mark.parametrize("positions", POSITION_SCHEMES)
def test_every_kind_of_position_reads_the_longest_source(run: Run, positions: str) -> None:
    config = SMALL.change(model={"positions": positions, "max_length": 40}, data={"max_length": 40})
    model = build_transformer(config.model, len(run.vocabulary.target))
    params = init_params(model, jax.random.key(0))
    translator = Translator(model, run.vocabulary, config.decode)
    [[best]] = translator.translate(params, [" ".join(["one"] * 60)], truncate=True)
    assert np.isfinite(best.score)


def with_table(run: Run, out_of_range_positions: str, **decode: Any) -> Translate:
    """Return the search by a model that never ends and whose learned tables have 20 positions."""
    learned = {
        "positions": "learned",
        "max_positions": 20,
        "out_of_range_positions": out_of_range_positions,
    }
    config = SMALL.change(model=learned, data={"max_length": 20}, decode=decode)
    model = build_transformer(config.model, len(run.vocabulary.target))
    params = init_params(model, jax.random.key(1))
    # Its logit is 0 then, and that of the likeliest piece is above.
    table = params["embedding"]["table"]
    params["embedding"]["table"] = table.at[EOS].set(0)
    translator = Translator(model, run.vocabulary, config.decode)
    return functools.partial(translator.translate, params)


def test_a_line_past_the_learned_table_is_named_unless_it_is_clamped(run: Run) -> None:
    lines = ["one", " ".join(["one"] * 15)]
    [short, long] = map(len, run.vocabulary.source.encode(lines))
    assert short < 20 < long
    refused = with_table(run, "error")
    told = rf"^line 2 has {long} pieces, and the model reads 20 \(model.max_positions\)"
    with pytest.raises(DataError, match=told):
        refused(lines)
    assert len(refused(lines, truncate=True)) == len(with_table(run, "clamp")(lines)) == 2


def test_a_translation_ends_where_the_learned_table_does_unless_it_is_clamped(run: Run) -> None:
    def translated(out_of_range_positions: str, extra: int) -> Hypothesis:
        [[best]] = with_table(run, out_of_range_positions, max_extra_length=extra, beam_size=1)(
            ["one"]
        )
        return best

    # So many more pieces than the source has are as many as the table has.
    fitting = 20 - len(run.translator().encode(["one"])[0])
    expected = translated("clamp", fitting)
    assert translated("error", 40) == expected
    assert len(translated("clamp", 40).text) > len(expected.text)


def test_load_changes_nothing_and_needs_nothing_but_the_folder(
    run: Run, lines: list[str], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run.folder.path, tmp_path / "copy with a space"))
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    loaded = transformer_jax.load(copy)
    assert loaded.translate(lines[:5]) == run.translate(lines[:5])
    assert loaded.config == run.config
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_an_average_is_loaded_when_asked_for(run: Run) -> None:
    mean = load(run.folder.path, average_checkpoints=2)
    assert mean.average_checkpoints == 2
    assert mean.step == 200
    differences = jax.tree.map(lambda a, b: float(abs(a - b).max()), mean.params, run.params)
    assert max(jax.tree.leaves(differences)) > 0
    with pytest.raises(UsageError, match="mean of 3"):
        load(run.folder.path, average_checkpoints=3)
    for average in (0, -1):
        with pytest.raises(UsageError, match=f"average must be positive, got {average}"):
            load(run.folder.path, average_checkpoints=average)


def test_a_run_is_loaded_as_it_was_at_a_step(run: Run, lines: list[str]) -> None:
    earlier = load(run.folder.path, step=100)
    assert earlier.steps == (100,)
    assert earlier.translate(lines[:20]) != run.translate(lines[:20])
    assert load(run.folder.path, step=200).translate(lines[:20]) == run.translate(lines[:20])
    with pytest.raises(UsageError, match=r"has no checkpoint of step 150; there are: 100, 200$"):
        load(run.folder.path, step=150)


def test_a_model_that_gives_no_numbers_still_gives_a_line(run: Run) -> None:
    broken = jax.tree.map(lambda x: x * np.nan, run.params)
    found = run.translator().translate(broken, ["one", "", "two"])
    assert [len(best) for best in found] == [1, 1, 1]


def test_what_cannot_be_asked_of_a_beam_is_told(run: Run) -> None:
    with pytest.raises(UsageError, match="beam of 4 has no 5 best"):
        run.translate_best(["one"], 5)
    with pytest.raises(UsageError, match="has no 0 best"):
        run.translate_best(["one"], 0)
    with pytest.raises(ConfigError, match=r"decode.beam_size must be positive"):
        run.translate(["one"], beam_size=0)


def test_the_command_line_translates_standard_input(
    run: Run, lines: list[str], monkeypatch: pytest.MonkeyPatch, capfdbinary: Any, tmp_path: Path
) -> None:
    text = tmp_path / "in.txt"
    text.write_text(f"{lines[0]}\n\n{lines[1]}", "utf-8")
    path = str(run.folder.path)

    def translate(*options: str) -> bytes:
        with text.open() as file:
            monkeypatch.setattr("sys.stdin", file)
            assert main(["translate", path, *options]) == 0
        return capfdbinary.readouterr().out

    first, second = run.translate(lines[:2])
    assert translate().decode() == f"{first}\n\n{second}\n"
    ranked = [line.split("\t") for line in translate("--n-best", "2").decode().splitlines()]
    assert [number for number, *_ in ranked] == ["1", "1", "2", "3", "3"]
    assert ranked[0][2] == first
    assert translate("--beam-size", "1").decode().split("\n")[1] == ""
