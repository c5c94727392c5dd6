"""Test `Run.attention` on an untrained run."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import SMALL
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.console import format_for_shell
from transformer_jax.errors import DataError, StorageError, UsageError
from transformer_jax.inference.attention import Attention
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.inference.translate import Translator
from transformer_jax.model.build import build_transformer
from transformer_jax.model.inspect import attention_weights

SOURCE, TARGET = "twenty-one", "einundzwanzig"
LONG = " ".join(["one"] * 200)
# Most tests use the same search options, because each set of options is compiled separately.
GREEDY = {"beam_size": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, steps=(8,), scale=3.0).path)


@pytest.fixture(scope="module")
def attention(run: Run) -> Attention:
    return run.attention(SOURCE, TARGET)


def test_the_weights_are_those_of_the_sentence_without_padding(
    run: Run, attention: Attention
) -> None:
    [source] = run.vocabulary.source.encode([SOURCE])
    [target] = run.vocabulary.target.encode([TARGET])
    assert attention.encoder.shape == (1, 2, len(source), len(source))
    assert attention.cross.shape == (1, 2, len(target), len(source))
    batches = jnp.asarray([source]), jnp.asarray([target])
    compute = jax.jit(attention_weights, static_argnums=0)
    for kind, expected in compute(run.model, run.params, *batches).items():
        weights = getattr(attention, kind)
        np.testing.assert_allclose(weights, np.asarray(expected)[:, 0], atol=1e-6)
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    assert not np.any(np.triu(attention.decoder, 1))


def test_tokens_are_the_pieces_of_the_text_and_special_tokens_have_names(
    attention: Attention,
) -> None:
    for tokens, text in ((attention.source_tokens, SOURCE), (attention.target_tokens, TARGET)):
        *pieces, end = tokens
        assert end == "<EOS>"
        assert "".join(pieces) == f"▁{text}"
    assert attention.decoder_input_tokens == ("<BOS>", *attention.target_tokens[:-1])
    assert (attention.source, attention.target) == (SOURCE, TARGET)


def test_the_default_target_is_the_best_translation(run: Run) -> None:
    attention = run.attention(SOURCE, **GREEDY)
    assert attention.target == run.translate([SOURCE], **GREEDY)[0]
    assert run.vocabulary.target.decode(
        [
            run.translator(**GREEDY).translate_tokens(
                run.params, run.vocabulary.source.encode([SOURCE])[0]
            )
        ]
    ) == [attention.target]
    assert attention.cross.shape[2] == len(attention.target_tokens)


def test_the_axes_of_each_kind_have_its_tokens(attention: Attention) -> None:
    maps = attention.maps
    inputs = attention.decoder_input_tokens
    axes = {kind: (chosen.queries, chosen.keys) for kind, chosen in maps.items()}
    assert axes == {
        "encoder": (attention.source_tokens, attention.source_tokens),
        "decoder": (inputs, inputs),
        "cross": (attention.target_tokens, attention.source_tokens),
    }
    assert maps["cross"].weights is attention.cross


def test_blank_and_long_sentences_are_errors(run: Run) -> None:
    for blank in ("", "  "):
        with pytest.raises(DataError, match="the source sentence is blank"):
            run.attention(blank, TARGET)
        with pytest.raises(DataError, match="the target sentence is blank"):
            run.attention(SOURCE, blank)
    with pytest.raises(DataError, match=r"at most 64 .* pass truncate=True$") as caught:
        run.attention(LONG)
    assert format_for_shell(caught.value).endswith("pass --truncate")
    assert len(run.attention(LONG, TARGET, truncate=True).source_tokens) == 64


@pytest.mark.parametrize("beam_size", [1, 2])
def test_weights_that_are_not_finite_are_an_error(run: Run, beam_size: int) -> None:
    broken = replace(run, params=jax.tree.map(lambda x: x * jnp.nan, run.params))
    with pytest.raises(UsageError, match="weights are not finite: load another checkpoint"):
        broken.attention(SOURCE, beam_size=beam_size)


def test_search_options_with_a_target_are_errors(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="beam_size cannot be used with a target"):
        run.attention(SOURCE, TARGET, **GREEDY)
    command = ["attention", str(run.folder.path), SOURCE, TARGET, "--beam-end", "any"]
    assert main(command) == 2
    assert "--beam-end does not apply with a TARGET" in capsys.readouterr().err


def test_a_target_is_limited_by_a_table_of_positions(run: Run) -> None:
    learned = SMALL.change(model={"positions": "learned", "max_positions": 64})
    model = build_transformer(learned.model, **run.vocabulary.sizes)
    translator = Translator(model, run.vocabulary, learned.decode)
    with pytest.raises(DataError, match=r"at most 64 \(model.max_positions\).*truncate=True$"):
        translator.encode_target(LONG)
    tokens = translator.encode_target(LONG, truncate=True)
    assert (len(tokens), tokens[-1]) == (64, translator.encode_target("ein")[-1])


@pytest.mark.parametrize(
    "selection", [{"foo": 1}, {"kind": 3}, {"layer": "x"}, {"heads": 3}, {"position": 1.5}]
)
def test_an_invalid_selection_is_a_usage_error(
    attention: Attention, selection: dict[str, object], tmp_path: Path
) -> None:
    for draw in (attention.show, attention.draw, partial(attention.save, tmp_path / "x.html")):
        with pytest.raises(UsageError, match=next(iter(selection))):
            draw(**selection)
    assert attention.show(heads=np.array([0])).html == attention.show(heads=[0]).html


def test_a_picture_is_written_in_the_format_of_its_name(
    attention: Attention, tmp_path: Path
) -> None:
    for name, start in (("x.html", b"<!doctype html>"), ("x.SVG", b"<?xml"), ("x.png", b"\x89PNG")):
        attention.save(tmp_path / name, kind="encoder", layer=0)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert (tmp_path / "x.html").read_text("utf-8") == attention.show(kind="encoder", layer=0).html


@pytest.mark.parametrize(
    ("name", "selection", "message"),
    [
        ("x.pdf", {}, "the file name must end in .html, .svg, or .png"),
        ("x.html", {"layer": 1}, "layer 1 does not exist: choose one from 0 to 0"),
        ("x.svg", {"kind": "crosss"}, "did you mean 'cross'?"),
        ("x.png", {"heads": [2]}, "head 2 does not exist"),
    ],
)
def test_an_unknown_format_or_selection_is_an_error_and_writes_no_file(
    name: str, selection: dict[str, Any], message: str, attention: Attention, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        attention.save(tmp_path / name, **selection)
    assert not list(tmp_path.iterdir())


def test_a_file_in_a_missing_folder_is_an_error(attention: Attention, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere/x.html cannot be written: No such file"):
        attention.save(tmp_path / "nowhere" / "x.html")


def test_the_repr_is_short(attention: Attention) -> None:
    lengths = f"{len(attention.source_tokens)} -> {len(attention.target_tokens)}"
    assert repr(attention) == f"Attention(1 layers, 2 heads, {lengths} tokens)"
