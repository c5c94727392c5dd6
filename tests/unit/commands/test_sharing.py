"""Test the mistakes that the commands `export` and `import` recognize before they load a model."""

from pathlib import Path

import pytest
from example_configs import SMALL
from processes import mistake
from run_files import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", SMALL)


def test_only_ctranslate2_stores_other_types(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--format", "marian", "--quantization", "int8"]
    error = mistake(capsys, ["export", str(run), *options])
    assert "--quantization int8 needs --format ctranslate2" in error


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_folder_that_exists_is_not_overwritten(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("mine")
    assert str(out) in mistake(capsys, [command, str(run), "--out", str(out)])
    assert (out / "file").read_text() == "mine"
