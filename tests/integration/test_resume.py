"""Test that resuming or loading a run rejects a different config, text, or model."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from example_configs import SMALL
from rich.console import Console
from training_runs import resume

import transformer_jax
from transformer_jax import progress
from transformer_jax.cli import main
from transformer_jax.data.number_words import NumberWords
from transformer_jax.distributed import heartbeat
from transformer_jax.errors import ConfigError, DataError, StorageError
from transformer_jax.files import read_json, write_json
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.create_run import create_run


def test_a_run_rejects_another_config_and_names_each_changed_field(whole_run: Path) -> None:
    folder = RunFolder.open(whole_run)
    other = folder.config.change(model={"dropout": 0.2}, train={"seed": 1, "steps": 9})
    with pytest.raises(ConfigError) as caught:
        folder.with_config(other)
    assert "model.dropout 0.1 -> 0.2" in str(caught.value)
    assert "train.seed 0 -> 1" in str(caught.value)
    assert "steps" not in str(caught.value)
    assert RunFolder.open(whole_run).config == folder.config


def test_a_run_rejects_fewer_steps_than_it_has_done(whole_run: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.steps must be at least 8, .* got 7"):
        resume(whole_run, train={"steps": 7})
    assert RunFolder.open(whole_run).config.train.steps == 8


def copy_with_description(run: Path, copy: Path, section: str, **values: Any) -> Path:
    """Copy a run and change one section of its description."""
    shutil.copytree(run, copy)
    description = read_json(copy / "run.json")
    target = description[section]
    if section == "config":
        target = target["model"]
    target |= values
    write_json(copy / "run.json", description)
    return copy


def test_a_run_rejects_text_that_differs_from_the_original(whole_run: Path, tmp_path: Path) -> None:
    copy = copy_with_description(whole_run, tmp_path / "copy", "data", fingerprint="0" * 64)
    with pytest.raises(DataError, match="not the text that the run was created with"):
        resume(copy, train={"steps": 9})


def test_a_run_rejects_the_checkpoint_of_another_model(whole_run: Path, tmp_path: Path) -> None:
    copy = copy_with_description(whole_run, tmp_path / "copy", "config", d_ff=48)
    with pytest.raises(StorageError, match=r"another run: model.d_ff 32 -> 48"):
        transformer_jax.load(copy)


@pytest.mark.slow
def test_moved_text_must_be_the_same_even_if_the_original_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "cache"))
    pairs = list(NumberWords(60).read("train"))
    for folder, dev in (("texts", pairs[:5]), ("moved", pairs[:5]), ("other", pairs[5:9])):
        Path(folder).mkdir()
        for name, lines in (("train", pairs), ("dev", dev)):
            for language, side in zip(("en", "de"), zip(*lines, strict=True), strict=True):
                text = "".join(f"{line}\n" for line in side)
                Path(folder, f"{name}.{language}").write_text(text, "utf-8")
    files = {"train": ("train.en", "train.de"), "dev": ("dev.en", "dev.de"), "folder": "texts"}
    config = SMALL.change(data={"corpus": "text", **files}, train={"steps": 1})
    path = Path("run")
    create_run(config, path, Console(quiet=True))

    for options, message in (
        (["--data.folder", "other"], "is not the text that the run was created with"),
        (["--data.dev", "dev.en", "nowhere.de"], "there is no file texts/nowhere.de"),
    ):
        assert main(["resume", "run", *options]) == 65
        assert message in capsys.readouterr().err
        assert RunFolder.open(path).config.data.folder == "texts"
    ours, theirs = os.pipe()
    monkeypatch.setattr(heartbeat, "_pipe", theirs)
    # `heartbeat.connect` adds this listener.
    listener: progress.Reporter = lambda activity, *_: heartbeat.busy(activity)  # noqa: E731
    monkeypatch.setattr(progress, "listeners", [listener])
    assert main(["resume", "run", "--data.folder", "moved"]) == 0
    monkeypatch.undo()
    os.close(theirs)
    with os.fdopen(ours, encoding="utf-8") as messages:
        # Because of this heartbeat message, a supervisor does not count the check as part of
        # startup.
        assert next(messages) == "busy checking the moved text\n"
    monkeypatch.chdir(tmp_path)
    assert RunFolder.open(path).config.data.folder == "moved"
    # `evaluate` has no option for the data folder, so its error suggests `resume`.
    Path("moved").rename("again")
    monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / "empty"))
    assert main(["evaluate", "run", "--split", "dev"]) == 65
    line = capsys.readouterr().err
    assert (
        "no file moved/train.en; if the text has moved, resume the run with --data.folder" in line
    )
    for split in ("dev", None):
        with pytest.raises(DataError, match=r"resume the run with data\.folder="):
            transformer_jax.load("run").evaluate(split)
    # A package cannot resume.
    assert main(["package", "run", "--out", "packaged"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "packaged", "--split", "dev"]) == 65
    line = capsys.readouterr().err
    assert line.endswith("; if the text has moved, set TRANSFORMER_JAX_DATA to its folder\n")
