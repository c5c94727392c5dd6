import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_configs import FILES, SMALL
from rich.console import Console
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.errors import StorageError, UsageError
from transformer_jax.evaluation.evaluate import evaluate
from transformer_jax.evaluation.evaluation_files import save_evaluation
from transformer_jax.files import read_json, write_json
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sharing.packaging import package_run
from transformer_jax.training.create_run import create_run

LINES = ["one", "two hundred and thirty-one", "ninety thousand"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that averages two checkpoints and translates different lines differently."""
    # This model is so wide that its parameters account for most of a package's size.
    config = SMALL.change(model={"d_ff": 4096}, decode={"average_checkpoints": 2, "beam_size": 2})
    return load(write_untrained_run(tmp_path_factory.mktemp("runs") / "run", config, scale=3).path)


@pytest.fixture(scope="module")
def package(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package_run(run, tmp_path_factory.mktemp("packages") / "größe 1").path


def assert_same_params(one: Run, other: Run) -> None:
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_a_package_translates_as_its_run_does(run: Run, package: Path) -> None:
    assert {path.name for path in package.iterdir()} == {
        *("README.md", "run.json", "tokenizer.model", "checkpoints", "SHA256SUMS")
    }
    assert [path.name for path in (package / "checkpoints").iterdir()] == ["8"]
    assert not (package / "checkpoints" / "8" / "optimizer").exists()
    loaded = load(package)
    assert_same_params(loaded, run)
    assert loaded.steps == run.steps == (4, 8)
    # A package stores only the file names of absolute paths.
    files: dict[str, Any] = {
        split: tuple(Path(name).name for name in names) for split, names in FILES.items()
    }
    assert loaded.config == run.config.change(data=files)
    assert loaded.folder.versions == run.folder.versions
    translations = run.translate(LINES)
    assert len(set(translations)) > 1
    assert loaded.translate(LINES) == translations
    assert loaded.translate(LINES) == load(
        shutil.copytree(package, package.parent / "copy")
    ).translate(LINES)


def test_a_bfloat16_package_is_smaller_and_is_computed_in_float32(run: Run, tmp_path: Path) -> None:
    sizes: dict[str, int] = {}
    for dtype in ("float32", "bfloat16"):
        folder = package_run(run, tmp_path / dtype, dtype=dtype).checkpoints / "8" / "params"
        sizes[dtype] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]
    loaded = load(tmp_path / "bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), run.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, rounded)
    assert loaded.translate(LINES) == dataclasses.replace(run, params=rounded).translate(LINES)


def test_a_package_has_one_set_of_parameters(package: Path) -> None:
    for average, step in ((1, None), (2, 8), (None, 8)):
        assert load(package, average_checkpoints=average, step=step).steps == (4, 8)
    for average, step in ((3, None), (None, 4)):
        with pytest.raises(UsageError, match=r"is a package and contains only the mean of"):
            load(package, average_checkpoints=average, step=step)
    with pytest.raises(UsageError, match="is a package and has no separate checkpoints"):
        evaluate(load(package), "dev", {}, per_checkpoint=True)


def test_a_package_cannot_be_trained(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(package)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"transformer-jax: {package} is packaged without optimizer state and")
    assert line.endswith(f"--init-from '{package}'\n")
    assert line.count("\n") == 1
    assert main(["train", "tiny", "--out", str(package)]) == 2
    line = capsys.readouterr().err
    assert f"{package} already exists: start another run with" in line


def test_a_new_run_can_start_with_the_parameters_of_a_package(
    run: Run, package: Path, tmp_path: Path
) -> None:
    create_run(run.config, tmp_path / "new", Console(quiet=True), init_from=package)
    assert_same_params(load(tmp_path / "new", average_checkpoints=1), run)


def test_the_checksums_verify_a_package_and_damage_is_detected(
    package: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(package, tmp_path / "copy")
    verify = ["sha256sum", "--quiet", "-c", "SHA256SUMS"]
    assert subprocess.run(verify, cwd=copy, check=False).returncode == 0
    array = max((copy / "checkpoints").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(array.read_bytes())
    content[len(content) // 2] ^= 1
    array.write_bytes(content)
    assert subprocess.run(verify, cwd=copy, capture_output=True, check=False).returncode == 1
    with pytest.raises(StorageError, match="is damaged"):
        load(copy)


def test_a_package_names_no_folder_of_the_machine(run: Run, tmp_path: Path) -> None:
    files = {split: (f"/private/a/{split}.en", f"b/{split}.de.gz") for split in ("train", "dev")}
    data = {**files, "corpus": "text", "folder": "/private/c"}
    folder = RunFolder.create(
        tmp_path / "run", run.config.change(data=data), run.vocabulary, run.folder.fingerprint
    )
    path = package_run(Run(folder, run.params, run.steps), tmp_path / "package").path
    contents = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    paths = b"/private", str(tmp_path).encode(), str(run.folder.path).encode()
    assert not [file for file, x in contents.items() for path in paths if path in x]
    assert load(path).config.data.train == ("train.en", "b/train.de.gz")
    assert "train.en b/train.de.gz" in (path / "README.md").read_text("utf-8")


def test_the_command_prints_the_size_and_what_the_card_lacks(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "package"
    arguments = ["package", str(run.folder.path), "--out", str(out), "--average-checkpoints", "1"]
    note = "The captions state no license."
    assert main([*arguments, "--dtype", "bfloat16", "--data-note", note]) == 0
    output = capsys.readouterr()
    assert f"packaged in {out}: 0.4 MB, bfloat16, steps 8\n" in output.out
    assert f"next: transformer-jax translate {out} < FILE\n" in output.out
    assert "note: the model card has no license; choose one with --license\n" in output.err
    assert "evaluate" in output.err
    card = (out / "README.md").read_text("utf-8")
    assert "The model had not been evaluated when it was packaged." in card
    assert 'license: "unknown"' in card
    assert f"\n\n{note}\n\n- The vocabulary has" in card
    assert "metrics" not in card
    # The command must not overwrite the folder, and the error must suggest a new name.
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    assert f"{out} already exists: choose another folder with `--out {out}-2`" in (
        capsys.readouterr().err
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_input_is_one_line_and_leaves_no_folder(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = RunFolder.create(tmp_path / "empty", run.config, run.vocabulary, run.folder.fingerprint)
    path = str(run.folder.path)
    for arguments, message in (
        ([str(empty.path)], "has no checkpoint yet"),
        ([str(tmp_path / "none")], "is not a run: it has no run.json"),
        ([path, "--step", "5"], "has no checkpoint to average at step 5"),
        ([path, "--average-checkpoints", "3"], "cannot average 3 checkpoints"),
        ([path, "--dtype", "float16"], "--dtype must be float32 or bfloat16, got 'float16'"),
        ([path, "--license", "a: b\nc"], "a license is an identifier such as cc-by-4.0"),
        ([path, "--languages", "english", "de"], "a language is an identifier such as en"),
    ):
        assert main(["package", *arguments, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_a_full_disk_leaves_no_package(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_space)
    with pytest.raises(StorageError, match=r"could not be written: .*No space left"):
        package_run(run, tmp_path / "package")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "package",
    [{"steps": [], "dtype": "float32"}, {"steps": [4, 8], "dtype": "int8"}, {"steps": 8}, None],
)
def test_an_invalid_description_is_rejected(
    run: Run, tmp_path: Path, package: dict[str, Any] | None
) -> None:
    path = package_run(run, tmp_path / "package").path
    description = read_json(path / "run.json")
    write_json(path / "run.json", description | {"package": package})
    with pytest.raises(StorageError, match=r"run.json (cannot be read|has no)"):
        RunFolder.open(path)


@pytest.mark.slow
def test_a_package_is_evaluated_as_a_run_and_its_scores_are_on_the_next_card(
    run: Run, tmp_path: Path
) -> None:
    first = load(package_run(run, tmp_path / "first").path)
    evaluation = evaluate(first, "dev", {})
    folder = save_evaluation(first, evaluation)
    assert folder.name == "dev-step8-average2-beam2-alpha0.6-max-extra-length-8"
    second = package_run(first, tmp_path / "second", dtype="bfloat16", license_id="mit").path
    card = (second / "README.md").read_text("utf-8")
    scores = evaluation.scores
    row = f"| `dev` | 40 | 2 | `tensor2tensor` | 0.6 | {scores.bleu:.2f} | {scores.chrf:.2f} |"
    assert row in card
    assert f"- BLEU `{scores.bleu_signature}`" in card
    assert "before the parameters were rounded to bfloat16" in card
    # Scores from other checkpoints do not apply to this model.
    single = load(run.folder.path, average_checkpoints=1)
    save_evaluation(single, evaluate(single, "dev", {}))
    third = package_run(run, tmp_path / "third").path
    assert "had not been evaluated" in (third / "README.md").read_text("utf-8")
