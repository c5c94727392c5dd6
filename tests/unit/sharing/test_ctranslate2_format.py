import sys
from pathlib import Path
from typing import Literal

import ctranslate2
import pytest
from example_configs import SMALL
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.sharing.ctranslate2_format import export_ctranslate2
from transformer_jax.sharing.verify import CTranslate2System, Verification, verify

# A config with many options that CTranslate2 supports but the paper does not use.
VARIANT = SMALL.change(
    model={
        "num_layers": 2,
        "d_k": 4,
        "d_v": 4,
        "layer_norm": "pre",
        "layer_norm_epsilon": 0.1,
        "attention_bias": True,
        "attention_score": "dot_product",
        "tie_embeddings": "none",
        "positions": "learned",
        "num_decoder_layers": 1,
        "activation": "gelu",
        "output_bias": True,
    },
    data={"source_vocab_size": 60},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with the paper's architecture, whose translations vary with the source line."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, steps=(4,), scale=3).path)


def test_the_exported_model_translates_as_the_run(run: Run, tmp_path: Path) -> None:
    export_ctranslate2(run, tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        *("model.bin", "config.json", "shared_vocabulary.json", "source.spm", "target.spm")
    }
    result = verify(run, CTranslate2System(tmp_path / "model"))
    assert (result.sentences, result.equal) == (20, 20)
    # Scores are in the hundreds, because the parameters are large.
    assert 0 < result.score_difference < 2e-3


@pytest.mark.slow
def test_the_variants_translate_as_the_run(tmp_path: Path) -> None:
    run = load(write_untrained_run(tmp_path / "run", VARIANT, steps=(4,), scale=3).path)
    export_ctranslate2(run, tmp_path / "model")
    result = verify(run, CTranslate2System(tmp_path / "model"))
    assert (result.sentences, result.equal) == (20, 20)
    assert result.score_difference < 2e-3


@pytest.mark.parametrize(("quantization", "factor"), [("bfloat16", 0.6), ("int8", 0.9)])
def test_a_quantized_model_is_smaller_and_rounded(
    run: Run, tmp_path: Path, quantization: Literal["bfloat16", "int8"], factor: float
) -> None:
    # The export must work without PyTorch, although CTranslate2 uses PyTorch to round to bfloat16.
    export_ctranslate2(run, tmp_path / "exact")
    export_ctranslate2(run, tmp_path / "rounded", quantization)
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("exact", "rounded")]
    assert sizes[1] < factor * sizes[0]
    line = "two hundred and thirty-one"
    tokens = ["▁zwei"]
    exact = CTranslate2System(tmp_path / "exact").score(line, tokens)
    rounded = CTranslate2System(tmp_path / "rounded", quantization).score(line, tokens)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.1)


def test_the_command_verifies_and_does_not_overwrite(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    arguments = ["export", str(run.folder.path), "--out", str(out)]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert f"exported to {out}: 0.1 MB, ctranslate2, float32, step 4\n" in output
    assert "verified: 20 of 20 translations are equal; largest score difference " in output
    assert main(arguments) == 2
    assert f"{out} already exists: choose another folder with `--out" in capsys.readouterr().err
    other = ["--out", str(tmp_path / "other")]
    assert main([*arguments, *other, "--quantization", "int8", "--no-verify"]) == 0
    output = capsys.readouterr().out
    assert "ctranslate2, int8, step 4" in output
    assert "verified" not in output


def test_only_a_model_in_float32_must_translate_as_the_run(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformer_jax.sharing.verify.verify", lambda *_: Verification(20, 3, 9))
    arguments = ["export", str(run.folder.path), "--out"]
    assert main([*arguments, str(tmp_path / "exact")]) == 1
    output = capsys.readouterr()
    assert "verified" not in output.out
    assert output.err.endswith(
        "was written, but translates differently from the run: 3 of 20 translations are equal; "
        "largest score difference 9.0e+00; at least 90% of translations must be equal, and scores "
        "may differ by at most 0.05\n"
    )
    assert main([*arguments, str(tmp_path / "int8"), "--quantization", "int8"]) == 0
    assert "\ncompared: 3 of 20 translations are equal;" in capsys.readouterr().out


def test_a_missing_library_is_one_line(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2.specs", None)
    assert main(["export", str(run.folder.path), "--out", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert error == "transformer-jax: this feature needs ctranslate2: pip install ctranslate2\n"
    assert not (tmp_path / "model").exists()


def test_the_default_limits_of_ctranslate2_are_within_the_sinusoids(
    run: Run, tmp_path: Path
) -> None:
    export_ctranslate2(run, tmp_path / "model")
    translator = ctranslate2.Translator(str(tmp_path / "model"))
    # By default, a source is truncated after 1,024 tokens.
    [result] = translator.translate_batch([["▁one"] * 1100], beam_size=1)
    assert result.hypotheses


def test_the_limits_of_learned_positions_are_stated_and_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SMALL.change(model={"positions": "learned", "max_length": 40}, data={"max_length": 40})
    run = write_untrained_run(tmp_path / "run", config, steps=(4,), scale=3)
    assert main(["export", str(run.path), "--out", str(tmp_path / "model")]) == 0
    limits = "max_input_length=40 and max_decoding_length=89"
    assert f"pass {limits} to translate_batch" in capsys.readouterr().err
    translator = ctranslate2.Translator(str(tmp_path / "model"))

    def translate(**options: int) -> object:
        # A translation of the minimum length reaches every position.
        shortest = options["max_decoding_length"]
        source = [["▁one"] * 60]
        return translator.translate_batch(source, min_decoding_length=shortest, **options)

    translate(max_input_length=40, max_decoding_length=89)
    for name, value in (("max_input_length", 41), ("max_decoding_length", 91)):
        options = {"max_input_length": 40, "max_decoding_length": 89, name: value}
        with pytest.raises(RuntimeError, match="No position encodings"):
            translate(**options)
