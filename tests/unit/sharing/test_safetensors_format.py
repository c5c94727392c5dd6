import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from example_configs import NUMBER_WORDS, SMALL
from rich.console import Console
from run_files import write_untrained_run
from safetensors.numpy import load_file, save_file

from transformer_jax.cli import main
from transformer_jax.files import read_json
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.sharing.packaging import export_safetensors, read_safetensors
from transformer_jax.training.create_run import create_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose parameters are the mean of two checkpoints."""
    config = SMALL.change(
        data={**NUMBER_WORDS, "num_pairs": 200}, decode={"average_checkpoints": 2}
    )
    return load(write_untrained_run(tmp_path_factory.mktemp("runs") / "run", config).path)


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exports") / "model"
    export_safetensors(run, path)
    return path


def assert_same(one: Run, other: Run) -> None:
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
    assert one.config == other.config
    assert one.steps == other.steps
    assert one.folder.versions == other.folder.versions


def test_import_after_export_is_the_identity(run: Run, folder: Path, tmp_path: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        *("run.json", "tokenizer.model", "model.safetensors")
    }
    assert_same(read_safetensors(folder), run)
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert_same(load(tmp_path / "run"), run)


def test_every_file_has_the_permissions_of_an_ordinary_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    mode = (tmp_path / "ordinary").stat().st_mode
    assert {path.stat().st_mode for path in folder.iterdir()} == {mode}


def test_export_after_import_is_the_identity(folder: Path, tmp_path: Path) -> None:
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    export_safetensors(load(tmp_path / "run"), tmp_path / "model")
    for name in ("run.json", "tokenizer.model", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (folder / name).read_bytes()


def test_other_programs_find_the_parameters_by_flat_names(run: Run, folder: Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    kernel = run.params["decoder_0"]["cross_attention"]["query"]["kernel"]
    np.testing.assert_array_equal(arrays["decoder_0.cross_attention.query.kernel"], kernel)
    assert read_json(folder / "run.json")["config"]["model"]["d_model"] == 16


def test_the_commands_report_what_they_did(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    arguments = ["export", str(run.folder.path), "--format", "safetensors", "--out", str(out)]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert f"exported to {out}: 0.0 MB, safetensors, float32, mean of steps 4, 8\n" in output
    assert "verified: the parameters are equal\n" in output
    assert f"next: transformer-jax import {out}\n" in output
    assert main([*arguments[:-1], str(tmp_path / "b"), "--quantization", "int8"]) == 2
    assert "--quantization int8 needs --format ctranslate2" in capsys.readouterr().err
    assert main(["import", str(out), "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert f"imported to {tmp_path / 'run'}: {run.num_parameters:,} parameters\n" in output
    assert "next: echo 'forty-two' | transformer-jax translate" in output
    assert main(["import", str(out), "--out", str(tmp_path / "run")]) == 2
    assert "already exists" in capsys.readouterr().err


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def link(folder: Path) -> None:
    target = folder.parent / "weights"
    (folder / "model.safetensors").rename(target)
    (folder / "model.safetensors").symlink_to(target)


def rewrite(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        arrays = load_file(folder / "model.safetensors")
        change(arrays)
        save_file(arrays, folder / "model.safetensors")

    return damage


BIAS = "encoder_0.self_attention.query.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_weights, "is not an exported model: it has no model.safetensors"),
        (truncate, "model.safetensors cannot be read"),
        (flip_a_bit, "model.safetensors is damaged"),
        (link, "is a link or a special file"),
        (rewrite(lambda x: x.pop("embedding.table")), "lacks the parameter 'embedding.table'"),
        # Flax would ignore a bias that the model does not have.
        (rewrite(lambda x: x.update({BIAS: np.ones((2, 8), "f4")})), "has an unknown parameter"),
        (
            rewrite(lambda x: x.update({"embedding.table": np.ones((9, 16), "f4")})),
            "has the shape (9, 16) for embedding.table, but its config requires (64, 16)",
        ),
        (
            rewrite(lambda x: x.update({"embedding.table": np.ones((64, 16), "f2")})),
            "has embedding.table in the type F16; supported: F32",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    message: str,
) -> None:
    damage(shutil.copytree(folder, tmp_path / "copy"))
    assert main(["import", str(tmp_path / "copy"), "--out", str(tmp_path / "run")]) in (2, 74)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_exported_or_ordinary_run_is_not_mistaken_for_the_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An exported folder does not contain a checkpoint, and a run does not contain a safetensors
    # file.
    assert main(["translate", str(folder)]) != 0
    assert capsys.readouterr().err.count("\n") == 1
    run = create_run(SMALL, tmp_path / "run", Console(quiet=True))
    assert main(["import", str(run.path), "--out", str(tmp_path / "new")]) == 2
    assert "is not an exported model" in capsys.readouterr().err
