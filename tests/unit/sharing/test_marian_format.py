import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from example_configs import SMALL
from run_files import write_untrained_run
from safetensors.numpy import load_file, save_file

from transformer_jax.cli import main
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.model.inspect import parameter_shapes
from transformer_jax.sharing.marian_format import export_marian
from transformer_jax.sharing.marian_import import read_marian
from transformer_jax.sharing.marian_parameters import POSITIONS, channel_order, marian_shapes
from transformer_jax.sharing.model_card import find_scores
from transformer_jax.sharing.verify import MarianSystem, verify

LINES = ["two hundred and thirty-one", "forty-two", "ninety thousand", "q"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with Marian's layer-norm epsilon, so that both libraries compute the same function."""
    config = SMALL.change(model={"layer_norm_epsilon": 1e-5, "attention_bias": True})
    path = tmp_path_factory.mktemp("runs") / "run"
    run = load(write_untrained_run(path, config, steps=(4,), scale=3).path)
    # Add a constant to all parameters, because the initial biases are zero.
    return replace(run, params=jax.tree.map(lambda x: x + 0.01, run.params))


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exports") / "model"
    export_marian(run, path)
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_translates_as_the_run(run: Run, folder: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: `pip install --group interop`")
    pytest.importorskip("transformers", reason="transformers is not installed")
    result = verify(run, MarianSystem(folder), LINES)
    assert (result.sentences, result.equal) == (4, 4)
    assert result.score_difference < 2e-3


def test_marians_channels_are_the_sines_then_the_cosines(run: Run, folder: Path) -> None:
    assert channel_order(6).tolist() == [0, 2, 4, 1, 3, 5]
    arrays = load_file(folder / "model.safetensors")
    table = np.asarray(run.params["embedding"]["table"])
    marian = arrays["model.shared.weight"]
    np.testing.assert_array_equal(marian, np.concatenate([table[:, ::2], table[:, 1::2]], axis=1))
    assert sum(x.size for x in arrays.values()) == run.num_parameters + len(table)


def test_the_shapes_are_those_of_the_arrays(run: Run, folder: Path) -> None:
    shapes = marian_shapes(run.config.model, parameter_shapes(run.params))
    arrays = load_file(folder / "model.safetensors")
    assert shapes == {name: array.shape for name, array in arrays.items()}


def test_import_after_export_is_the_identity(run: Run, folder: Path, tmp_path: Path) -> None:
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    imported = load(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, imported.params, run.params)
    assert imported.config.model == run.config.model
    export_marian(imported, tmp_path / "again")
    # Marian's format cannot store the paper's length penalty, so the first generation_config.json
    # has no length penalty. The imported run uses a different penalty, which the second
    # generation_config.json contains.
    for file in {*folder.iterdir()} - {folder / "generation_config.json"}:
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def write_scores(folder: Path) -> None:
    scores = {
        "split": "test",
        "steps": [0],
        "sentences": 1000,
        "bleu": 99.0,
        "chrf": 99.0,
        "decode": {"beam_size": 4, "beam_end": "any", "length_penalty_alpha": 0.6},
        "perplexity": 1.0,
        "bleu_signature": "nrefs:1",
        "chrf_signature": "nrefs:1",
    }
    (folder / "evaluations" / "test").mkdir(parents=True)
    (folder / "evaluations" / "test" / "scores.json").write_text(json.dumps(scores))


def test_every_file_has_the_permissions_of_an_ordinary_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    mode = (tmp_path / "ordinary").stat().st_mode
    assert {path.stat().st_mode for path in folder.iterdir()} == {mode}


def test_scores_in_the_folder_do_not_reach_the_model_card(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    write_scores(copy)
    assert len(find_scores(copy, (0,))) == 1
    assert main(["import", str(copy), "--out", str(tmp_path / "run")]) == 0
    card = (tmp_path / "run" / "README.md").read_text("utf-8")
    assert "99.0" not in card
    assert "had not been evaluated" in card


def test_biases_of_zero_are_left_out(tmp_path: Path) -> None:
    run = load(write_untrained_run(tmp_path / "run", steps=(4,)).path)
    export_marian(run, tmp_path / "model")
    imported = read_marian(tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, imported.params, run.params)
    assert not imported.config.model.attention_bias


def change_settings(name: str = "config.json", **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        settings = json.loads((folder / name).read_text("utf-8"))
        (folder / name).write_text(json.dumps(settings | changes), "utf-8")

    return change


def test_a_tokenizer_without_a_limit_leaves_the_number_of_positions(
    folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    for longest, expected in ((None, 512), (int(1e30), 512), (100.0, 100), (600, 512)):
        change_settings("tokenizer_config.json", model_max_length=longest)(copy)
        config = read_marian(copy).config
        assert (config.model.max_length, config.data.max_length) == (expected, min(expected, 256))


def change_weights(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        arrays = load_file(folder / "model.safetensors")
        change(arrays)
        save_file(arrays, folder / "model.safetensors")

    return rewrite


def change_vocabulary(change: Callable[[dict[str, int]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        ids = json.loads((folder / "vocab.json").read_text("utf-8"))
        change(ids)
        (folder / "vocab.json").write_text(json.dumps(ids), "utf-8")

    return rewrite


def replace_by_folder(folder: Path) -> None:
    (folder / "target.spm").unlink()
    (folder / "target.spm").mkdir()


def move_weights(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def split_the_weights(folder: Path) -> None:
    move_weights("model-00001-of-00002.safetensors")(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def link_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "weights")
    (folder / "model.safetensors").symlink_to(folder.parent / "weights")


def link_the_scores(folder: Path) -> None:
    write_scores(folder)
    (folder / "evaluations" / "test").rename(folder.parent / "scores")
    (folder / "evaluations" / "test").symlink_to(folder.parent / "scores")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_settings(model_type="bart"), "is not a Marian model: model_type 'bart'"),
        (change_settings(activation_function="mish"), "has activation_function mish, but"),
        (change_settings(decoder_layers=6), "lacks the parameter 'model.decoder.layers.1."),
        (change_settings(decoder_ffn_dim=6), "has decoder_ffn_dim 6, but this package requires"),
        (change_settings(scale_embedding=False), "has scale_embedding False, but"),
        (change_settings(normalize_embedding=True), "has normalize_embedding True, but"),
        (change_settings(static_position_embeddings=False), "has static_position_embeddings Fal"),
        (change_settings(tie_word_embeddings=False), "has tie_word_embeddings False, but"),
        (change_settings(normalize_before=True), "lacks the parameter 'model.decoder.layer_norm."),
        (change_settings(pad_token_id=63), "has pad_token_id 63, but the vocabulary has 0 for"),
        (change_settings(eos_token_id=None), "has eos_token_id None, but the vocabulary has 2"),
        (change_settings(forced_eos_token_id=9), "has forced_eos_token_id 9, but"),
        (change_settings(decoder_start_token_id=64), "has the begin token 64, but its tokens have"),
        (change_settings(decoder_start_token_id=None), "decoder_start_token_id is missing"),
        (
            lambda x: (x / "generation_config.json").write_text('{"no_repeat_ngram_size": 3}'),
            "has no_repeat_ngram_size 3, but this package's search supports only 0",
        ),
        (
            change_settings("generation_config.json", num_beams=10**9),
            "generation_config.json has an invalid num_beams: decode.beam_size must be from 1 to",
        ),
        (change_settings(decoder_start_token_id=2), "has one ID for several special tokens"),
        (change_settings(vocab_size=65), "has the vocab_size 65, but vocab.json has 64 tokens"),
        (change_settings(encoder_attention_heads=3, decoder_attention_heads=3), "not a multiple"),
        (change_settings(d_model=10**9), "model.d_model must be from 1 to 1000000"),
        (change_settings(d_model=10**6), "but its config requires (64, 1000000)"),
        (change_settings(d_model="16"), "d_model must be a positive integer, got 16"),
        (
            change_settings(encoder_attention_heads=0, decoder_attention_heads=0),
            "encoder_attention_heads must be a positive integer, got 0",
        ),
        (change_settings(max_position_embeddings=10**12), "model.max_length must be from 1 to"),
        (
            change_settings("tokenizer_config.json", model_max_length=0),
            "tokenizer_config.json has the model_max_length 0, which is not a positive number",
        ),
        (lambda x: (x / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda x: (x / "config.json").write_bytes(b"\xff{}"), "config.json cannot be read"),
        (lambda x: (x / "config.json").write_text("[]"), "does not contain a JSON object"),
        (lambda x: (x / "vocab.json").write_text("{}"), "but vocab.json has 0 tokens"),
        (change_vocabulary(lambda x: x.update(new=64)), "has the vocab_size 64, but vocab.json"),
        (
            change_vocabulary(lambda x: x.update({"<s>": 64})),
            "has the ID 64 for '<s>', but",
        ),
        (change_vocabulary(lambda x: x.update({"<s>": 5})), "has no token with the ID 1"),
        (
            change_vocabulary(lambda x: x.update({"\ud800": x.pop("<s>")})),
            r"vocab.json has the token '\ud800', which is not text",
        ),
        (lambda x: (x / "target.spm").write_bytes(b"x"), "target.spm is not a SentencePiece model"),
        (lambda x: (x / "vocab.json").unlink(), "vocab.json cannot be read"),
        (lambda x: (x / "config.json").write_text("[" * 100_000), "config.json cannot be read"),
        (
            lambda x: (x / "generation_config.json").write_text("[]"),
            "does not contain a JSON object",
        ),
        (lambda x: (x / "model.safetensors").unlink(), "has neither: load the model with Marian"),
        (split_the_weights, "has neither: load the model with Marian"),
        (move_weights("flax_model.msgpack"), "has neither: load the model with Marian"),
        (lambda x: (x / "target.spm").unlink(), "target.spm cannot be read"),
        (replace_by_folder, "target.spm is not a regular file"),
        (lambda x: os.truncate(x / "model.safetensors", 5000), "model.safetensors cannot be read"),
        (link_the_weights, "model.safetensors is a link or a special file"),
        (link_the_scores, "copy/evaluations/test is a link or a special file"),
        (lambda x: os.mkfifo(x / "scores.json"), "scores.json is a link or a special file"),
        (lambda x: os.truncate(x / "model.safetensors", 1 << 30), "it has more than 95 MiB"),
        (change_weights(lambda x: x.pop("model.shared.weight")), "lacks the parameter"),
        (
            change_weights(lambda x: x["model.shared.weight"].__setitem__((3, 3), np.nan)),
            "model.safetensors has values in model.shared.weight that are not finite",
        ),
        (change_weights(lambda x: x.update(extra=np.ones(1, "f4"))), "has an unknown parameter"),
        (
            change_weights(lambda x: x.update({"lm_head.weight": np.ones((64, 16), "f4")})),
            "has different values in lm_head.weight and model.shared.weight, but config.json ties",
        ),
        (
            change_weights(lambda x: x.update({POSITIONS[1]: np.ones((512, 16), "f4")})),
            "has model.decoder.embed_positions.weight with values other than the sinusoids",
        ),
    ],
)
def test_a_folder_that_cannot_be_imported_is_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    message: str,
) -> None:
    damage(shutil.copytree(folder, tmp_path / "copy"))
    assert main(["import", str(tmp_path / "copy"), "--out", str(tmp_path / "run")]) in (2, 65, 74)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_decoder_that_starts_with_padding_does_so_in_the_folder(tmp_path: Path) -> None:
    config = SMALL.change(model={"decoder_start": "padding"})
    run = load(write_untrained_run(tmp_path / "run", config, steps=(4,)).path)
    export_marian(run, tmp_path / "model")
    copy = read_marian(tmp_path / "model")
    assert copy.config.model.decoder_start == "padding"
    assert copy.vocabulary.target.token_texts == run.vocabulary.target.token_texts


def test_the_command_says_that_the_epsilon_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_untrained_run(tmp_path / "run", steps=(4,))
    out = tmp_path / "model"
    options = ["--format", "marian", "--out", str(out), "--no-verify"]
    assert main(["export", str(run.path), *options]) == 0
    output = capsys.readouterr()
    assert output.err == (
        "note: Marian's layer normalization uses an epsilon of 1e-05 instead of 1e-06, so scores "
        "differ slightly\n"
    )
    assert f"exported to {out}: 0.0 MB, marian, float32, step 4\n" in output.out
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer_config.json", "vocab.json"),
        *("model.safetensors", "source.spm", "target.spm"),
    }
