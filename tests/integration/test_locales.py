"""Test that file names, file contents, and standard streams do not depend on the locale."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_python

import transformer_jax
from transformer_jax.sweeps.slots import find_slots

PACKAGE = Path(transformer_jax.__file__).parent
# Without these variables, Python uses UTF-8 in the C locale.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# This program prints names and text in ASCII, because its own output is in the locale's encoding.
TRY_LIBRARY = """
import locale, sys
from pathlib import Path
from transformer_jax.data.tf_datasets import _utf8_locale
from transformer_jax.data.tokenizer import check_model
assert locale.getencoding().lower() not in ("utf-8", "utf8"), locale.getencoding()
with _utf8_locale(), open("text") as file:
    print(ascii(file.read()))
assert locale.getencoding().lower() not in ("utf-8", "utf8")
check_model(Path(sys.argv[1]).read_bytes(), "model")
"""
CONFIG = """
from transformer_jax.config import Config
CONFIG = Config().change(
    model={"num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 1, "d_k": 8, "d_v": 8},
    data={"corpus": "text", "folder": "texte-größe", "train": ["ä.en", "ä.de"],
          "dev": ["ä.en", "ä.de"], "vocab_size": 60, "batch_tokens": 200},
    train={"steps": 1, "warmup_steps": 1},
)
"""


@pytest.fixture(params=["C", "en_US.ISO-8859-1"])
def locale(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment variables of a locale whose encoding is not UTF-8."""
    if request.param == "C":
        return ASCII
    if shutil.which("localedef") is None:
        pytest.skip("needs localedef")
    language, _, encoding = request.param.partition(".")
    command = ["localedef", "-i", language, "-f", encoding, str(tmp_path / request.param)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the sources of locales")
    return {"LC_ALL": request.param, "LOCPATH": str(tmp_path), "PYTHONUTF8": "0"}


def run_command(
    locale: dict[str, str], folder: Path, *words: str, stdin: str = "", code: int = 0
) -> str:
    command = [sys.executable, "-m", "transformer_jax", *words]
    environment = {**os.environ, **locale}
    done = subprocess.run(
        command, cwd=folder, env=environment, input=stdin.encode(), capture_output=True, check=False
    )
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == code, output
    return output


def test_messages_and_names_of_files_are_utf8_in_every_locale(
    locale: dict[str, str], tmp_path: Path
) -> None:
    printed = run_command(locale, tmp_path, "status", "größe ▁日本", code=2)
    assert printed == "transformer-jax: größe ▁日本 is not a sweep: it has no sweep.json\n"


def test_the_library_reads_models_and_text_in_every_locale(
    locale: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("größe ▁", "utf-8")
    model = PACKAGE.parent / "examples" / "multi30k" / "tokenizer.model"
    done = run_python(TRY_LIBRARY, str(model), cwd=tmp_path, **locale)
    assert (done.stderr, done.stdout) == ("", r"'gr\xf6\xdfe \u2581'" + "\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("locale", ["C"], indirect=True)
def test_training_and_translation_work_in_an_ascii_locale(
    locale: dict[str, str], tmp_path: Path
) -> None:
    texts = tmp_path / "texte-größe"
    texts.mkdir()
    for language in ("en", "de"):
        lines = (f"größe {i} schön ½ {language}\n" for i in range(40))
        (texts / f"ä.{language}").write_text("".join(lines), "utf-8")
    (tmp_path / "möbel.py").write_text(CONFIG, "utf-8")
    run_command(locale, tmp_path, "train", "möbel.py", "--out", "läufe/eins")
    run_command(locale, tmp_path, "evaluate", "läufe/eins", "--split", "dev")
    run_command(locale, tmp_path, "translate", "läufe/eins", stdin="größe\n")
    (tmp_path / "möbel.py").rename(tmp_path / "plain.py")
    sweep = ["sweep", "plain.py", "--out", "läufe/zwei", "--seeds", "1", "--devices", "1"]
    assert "1 done" in run_command(locale, tmp_path, *sweep)


def test_the_output_of_programs_is_not_decoded_in_the_encoding_of_the_locale() -> None:
    text_mode = re.compile(r"[( ](text|universal_newlines)=True")
    paths = (path for path in PACKAGE.rglob("*.py") if text_mode.search(path.read_text("utf-8")))
    assert not list(paths)


def test_devices_are_counted_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ASCII.items():
        monkeypatch.setenv(name, value)
    assert find_slots(1)
