import copy
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from example_configs import SMALL
from pages import ROOT
from run_files import write_untrained_run

from transformer_jax.cli import main
from transformer_jax.commands.inference import CheckpointCommand
from transformer_jax.config import Config, ModelConfig
from transformer_jax.errors import UsageError
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sharing.expressible import FREE, Format, check_ctranslate2, check_marian


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_untrained_run(tmp_path_factory.mktemp("runs") / "run", steps=(4,))


@pytest.fixture(autouse=True)
def fail_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a command loads checkpoints."""

    def load(_: CheckpointCommand) -> None:
        pytest.fail("the checkpoints are loaded")

    monkeypatch.setattr(CheckpointCommand, "load", load)


@pytest.mark.parametrize("options", [[], ["--no-verify"]], ids=str)
@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ctranslate2", SMALL.change(model={"positions": "rotary"}), "model.positions rotary"),
        ("ctranslate2", SMALL.change(model={"attention_window": 4}), "model.attention_window 4"),
        ("marian", SMALL.change(model={"layer_norm": "pre"}), "model.layer_norm pre, only post"),
    ],
)
def test_a_model_that_cannot_be_exported_is_reported_before_it_is_loaded(
    small_run: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: Format,
    config: Config,
    message: str,
    options: list[str],
) -> None:
    options = [*options, *(["--quantization", "int8"] if name == "ctranslate2" else [])]
    run = RunFolder.create(tmp_path / "run", config, small_run.vocabulary, "0")
    arguments = ["--format", name, "--out", str(tmp_path / "model"), *options]
    assert main(["export", str(run.path), *arguments]) == 2
    assert f" cannot express {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "library"),
    [("ctranslate2", "ctranslate2"), ("marian", "safetensors"), ("safetensors", "safetensors")],
)
def test_a_missing_library_is_reported_before_the_run_is_loaded(
    small_run: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: Format,
    library: str,
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    arguments = ["--format", name, "--out", str(tmp_path / "model")]
    assert main(["export", str(small_run.path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error == f"transformer-jax: this feature needs {library}: pip install {library}\n"


def test_a_folder_that_is_not_a_run_is_reported_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "model")]) == 2
    assert f"{tmp_path} is not a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary"}, "cannot express model.positions rotary, only sinusoidal or"),
        ({"attention_score": "additive"}, "cannot express model.attention_score additive"),
        ({"d_v": 4}, "cannot express model.d_v 4, only 8"),
        ({"decoder_start": "padding"}, "cannot express model.decoder_start padding with model.out"),
    ],
)
def test_what_ctranslate2_cannot_express_is_refused_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        check_ctranslate2(SMALL.change(model=changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "learned"}, "cannot express model.positions learned, only sinusoidal"),
        ({"layer_norm": "pre"}, "cannot express model.layer_norm pre, only post"),
        ({"attention_score": "additive"}, "cannot express model.attention_score additive"),
        ({"d_k": 4}, "cannot express model.d_k 4, only 8"),
    ],
)
def test_what_marian_cannot_express_is_refused_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        check_marian(SMALL.change(model=changes))
    assert "\n" not in str(refused.value)


def test_the_documentation_lists_all_fields_that_exports_restrict() -> None:
    # Recurrent and convolutional architectures are rejected.
    others = {"rnn_cell", "rnn_input_feeding", "conv_kernel_width", "attention_implementation"}
    text = (ROOT / "docs/interop.md").read_text("utf-8")
    tables = re.findall(r"(?s)\n\| field \| values? \|\n.*?\n\n", text)
    restricted = {field.name for field in fields(ModelConfig)} - FREE - others
    for table, free in zip(tables, ({"layer_norm", "d_k"}, set[str]()), strict=True):
        assert restricted - free <= set(re.findall(r"`model\.(\w+)`", table))


@dataclass(frozen=True)
class LaterModelConfig(ModelConfig):
    """A config with a field that a later version might add."""

    new_field: str = "off"


@pytest.mark.parametrize("check", [check_ctranslate2, check_marian])
def test_a_new_field_is_refused_unless_it_has_its_default(check: Callable[[Config], None]) -> None:
    values = {field.name: getattr(SMALL.model, field.name) for field in fields(ModelConfig)}
    check(replace(SMALL, model=LaterModelConfig(**values)))
    with pytest.raises(UsageError, match="new_field on, only off"):
        check(replace(SMALL, model=LaterModelConfig(**values, new_field="on")))


@pytest.mark.parametrize("check", [check_ctranslate2, check_marian])
@pytest.mark.parametrize("field", [field.name for field in fields(ModelConfig)])
def test_each_field_is_free_or_limited_to_certain_values(
    check: Callable[[Config], None], field: str
) -> None:
    config = copy.deepcopy(SMALL)
    object.__setattr__(config.model, field, 2.5)
    if field in FREE - {"d_model", "num_heads"}:
        check(config)
    elif field not in FREE and not (field == "d_k" and check is check_ctranslate2):
        with pytest.raises(UsageError, match=f"cannot express model.{field} 2.5, only "):
            check(config)


@pytest.mark.parametrize("part", ["activation", "attention_implementation", "layer_norm"])
def test_a_part_from_outside_the_package_is_refused(part: str) -> None:
    config = copy.deepcopy(SMALL)
    object.__setattr__(config.model, part, "foreign")
    for check in (check_ctranslate2, check_marian):
        with pytest.raises(UsageError, match=f"cannot express model.{part} foreign"):
            check(config)
