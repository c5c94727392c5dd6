"""Test that config files load from any folder without side effects, and that errors are clear."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from transformer_jax.config import Config, loading
from transformer_jax.config.loading import load_config, load_rows, run_name, shipped_configs
from transformer_jax.errors import ConfigError

SHIPPED = sorted(path.stem for path in shipped_configs().glob("*.py"))
HEADS = "CONFIG = BASE.change(model={'num_heads': 4, 'd_k': 128, 'd_v': 128})\n"
# The paper's base model from Table 3: trained on WMT14, without checkpoint averaging.
BASE = Config().change(data={"corpus": "tfds"}, train={"keep_checkpoints": 1})
FOUR_HEADS = BASE.change(model={"num_heads": 4, "d_k": 128, "d_v": 128})
FROM_BASE = "from configs.base import CONFIG as BASE\n"
FROM_PACKAGE = "from transformer_jax.config import Config, Row\n"


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return str(path)


def mistake(spec: str) -> str:
    """Return the one-line error message for an invalid config."""
    with pytest.raises(ConfigError) as caught:
        load_config(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_loads_by_name_or_path_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = load_rows(name)
    assert rows == load_rows(str(shipped_configs() / f"{name}.py"))
    assert all(isinstance(row.config, Config) for row in rows.values())
    for row, expected in rows.items():
        assert load_config(f"{name}:{row}" if row else name) == expected.config


def test_the_rows_of_the_shipped_table_3_match_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(load_rows("table3")) == 20
    assert load_config("base") == load_config("table3:base") == BASE
    assert load_config("table3:A2") == FOUR_HEADS
    assert load_rows("table3:A2")["A2"].paper.perplexity == 5.00
    assert list(load_rows("table3:A2")) == ["A2"]


def test_an_installed_package_finds_the_configs_that_it_contains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shipped_configs(), tmp_path / "package" / "shipped" / "configs")
    monkeypatch.setattr(loading, "PACKAGE", tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    assert shipped_configs() == tmp_path / "package" / "shipped" / "configs"
    assert load_config("table3:A2") == FOUR_HEADS


@pytest.mark.parametrize(
    "name", ["mine.py", "configs/mine.py", "a folder with spaces/my own.py", "größe/Übung-é.py"]
)
def test_a_users_file_can_import_the_shipped_base(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / name, FROM_BASE + HEADS)
    assert load_config(path) == FOUR_HEADS
    monkeypatch.chdir(tmp_path)
    assert load_config(name) == FOUR_HEADS
    monkeypatch.chdir(Path(path).parent)
    assert load_config(Path(path).name) == FOUR_HEADS


def test_a_users_configs_folder_can_have_helpers_in_addition_to_the_shipped_files(
    tmp_path: Path,
) -> None:
    write(tmp_path / "configs" / "helper.py", "HEADS = {'num_heads': 4, 'd_k': 128, 'd_v': 128}\n")
    path = write(
        tmp_path / "configs" / "mine.py",
        FROM_BASE + "from configs.helper import HEADS\nCONFIG = BASE.change(model=HEADS)\n",
    )
    assert load_config(path) == FOUR_HEADS


@pytest.mark.parametrize("package", ["configs.base", "base"])
def test_modules_with_the_same_name_in_two_folders_do_not_mix(tmp_path: Path, package: str) -> None:
    text = f"from {package} import CONFIG as BASE\nCONFIG = BASE.change(train={{'seed': 3}})\n"
    paths: list[str] = []
    for heads in (2, 4):
        folder = tmp_path / str(heads) / "configs"
        write(
            folder / "base.py",
            FROM_PACKAGE + f"CONFIG = Config().change(model={{'num_heads': {heads}}})\n",
        )
        paths.append(write(folder / "mine.py", text))
    configs = [load_config(path) for path in (*paths, paths[0])]
    assert [config.model.num_heads for config in configs] == [2, 4, 2]
    assert [config.train.seed for config in configs] == [3, 3, 3]
    # The shipped config files must still import the shipped `base` config.
    assert load_config("table3:base") == BASE


@pytest.mark.parametrize(("last_line", "helper"), [(HEADS, "first"), ("1 / 0\n", "second")])
def test_loading_a_config_changes_no_modules_and_no_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_line: str, helper: str
) -> None:
    write(tmp_path / "configs" / "values.py", "")
    write(tmp_path / "configs" / f"{helper}_helper.py", "")
    path = write(
        tmp_path / "configs" / "mine.py",
        FROM_BASE + f"import configs.values\nimport {helper}_helper\n" + last_line,
    )
    earlier = ModuleType("configs")
    monkeypatch.setitem(sys.modules, "configs", earlier)
    modules, path_entries = dict(sys.modules), list(sys.path)
    if last_line == HEADS:
        assert load_config(path) == FOUR_HEADS
    else:
        mistake(path)
    assert sys.path == path_entries
    assert sys.modules["configs"] is earlier
    assert dict(sys.modules) == modules


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("CONFIG = (\n", 1, "SyntaxError"),
        ("\nimport nothing_of_this_name\n", 2, "No module named 'nothing_of_this_name'"),
        ("\n\nfrom configs.nowhere import CONFIG\n", 3, "configs.nowhere"),
        ("\nCONFIG = 1 / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("raise ValueError('first\\nsecond')\n", 1, "ValueError: first second"),
        (
            FROM_BASE
            + "from dataclasses import replace\n"
            + "CONFIG = replace(BASE, model=replace(BASE.model, num_haeds=1))\n",
            3,
            "unknown field 'num_haeds' of model; did you mean 'num_heads'?",
        ),
        (
            FROM_BASE + "from dataclasses import replace\nCONFIG = replace(BASE, modle=1)\n",
            3,
            "unknown field 'modle' of Config; did you mean 'model'?",
        ),
        (
            FROM_BASE + "CONFIG = BASE.change(model={'num_haeds': 1})\n",
            2,
            "unknown field 'num_haeds' of model; did you mean 'num_heads'?",
        ),
        (
            FROM_BASE + "CONFIG = BASE.change(modle={'num_heads': 1})\n",
            2,
            "unknown field 'modle' of config; did you mean 'model'?",
        ),
        (
            FROM_BASE + "CONFIG = BASE.change(model={'d_k': 0})\n",
            2,
            "model.d_k must be from 1 to 1000000",
        ),
        ("raise SystemExit('enough')\n", 1, "enough"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_line(
    tmp_path: Path, text: str, line: int, words: str
) -> None:
    path = write(tmp_path.resolve() / "mine.py", text)
    message = mistake(path)
    assert message.startswith(f"{path}, line {line}: ")
    assert words in message


def test_a_mistake_in_a_helper_is_reported_with_the_helpers_line(tmp_path: Path) -> None:
    helper = write(tmp_path.resolve() / "configs" / "helper.py", "\n\n1 / 0\n")
    path = write(tmp_path / "configs" / "mine.py", "import configs.helper\n")
    assert mistake(path).startswith(f"{helper}, line 3: ZeroDivisionError")


def test_a_mistake_in_a_file_next_to_the_package_is_reported_with_the_files_line(
    tmp_path: Path,
) -> None:
    clone = tmp_path.resolve() / "clone"
    clone.mkdir()
    for folder in (loading.PACKAGE, shipped_configs()):
        (clone / folder.name).symlink_to(folder)
    path = write(clone / "mine.py", FROM_BASE + "CONFIG = BASE.change(model={'num_haeds': 1})\n")
    code = "from transformer_jax.cli import main; raise SystemExit(main(['params', 'mine.py']))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert f"{path}, line 2: unknown field 'num_haeds'" in ended.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "defines neither CONFIG nor SWEEP"),
        ("config = 1\n", "defines neither CONFIG nor SWEEP"),
        ("CONFIG = 3\n", "must be a Config, got int"),
        ("CONFIG = {'model': {}}\n", "must be a Config, got dict"),
        ("SWEEP = {'a': 3}\n", "must be a Config, got int"),
        (FROM_PACKAGE + "SWEEP = {'a': Row(None)}\n", "must be a Config, got NoneType"),
        ("SWEEP = {}\n", "SWEEP must be a dictionary"),
        ("SWEEP = [3]\n", "SWEEP must be a dictionary"),
        (FROM_PACKAGE + "SWEEP = Config()\n", "SWEEP must be a dictionary"),
        (FROM_PACKAGE + "SWEEP = {1: Config(), 2: Config()}\n", "SWEEP must be a dictionary"),
        ("x = 'a\0b'\n", ""),
    ],
)
def test_a_file_that_defines_no_config_is_reported_by_name(
    tmp_path: Path, text: str, words: str
) -> None:
    path = write(tmp_path / "mine.py", text)
    message = mistake(path)
    assert path in message
    assert words in message


def test_a_file_that_is_not_utf_8_is_reported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(b"CONFIG = '\xff'\n")
    assert str(path) in mistake(str(path))


@pytest.mark.parametrize(
    ("spec", "suggestion"),
    [("tinny", "tiny"), ("configs/tabel3.py", "table3"), ("tabel3:A1", "table3"), ("bas", "base")],
)
def test_a_missing_file_is_reported_with_the_closest_shipped_one(
    spec: str, suggestion: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = mistake(spec)
    assert message.startswith(
        f"no config file {spec.removesuffix(':A1')}; did you mean '{suggestion}'?"
    )
    assert all(name in message for name in SHIPPED)


@pytest.mark.parametrize("spec", ["zzzzzz", "", ":", ".", "..", "/", "a" * 300])
def test_a_name_that_cannot_be_a_file_is_reported_in_one_line(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mistake(spec).startswith("no config file ")


def test_a_file_that_is_not_python_is_reported_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "{}")
    assert mistake(path) == f"{path} is not a Python file"


def test_a_missing_row_is_reported_with_the_closest_one(tmp_path: Path) -> None:
    assert mistake("table3:A11") == "table3 has no row 'A11'; did you mean 'A1'?"
    path = write(tmp_path / "mine.py", FROM_BASE + HEADS)
    assert mistake(f"{path}:A1") == f"{path} has no row 'A1'"
    with pytest.raises(ConfigError, match="table3 has no row 'A11'; did you mean 'A1'"):
        load_rows("table3:A11")


def test_a_sweep_without_the_name_of_a_row_is_reported_with_its_rows() -> None:
    assert (
        mistake("heads")
        == "heads has 5 rows; choose one, such as heads:base (available: base, A1, A2, A3, A4)"
    )


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("tiny", "tiny"),
        ("configs/tiny.py", "tiny"),
        ("configs/table3.py:A1", "table3-A1"),
        ("table3:A1", "table3-A1"),
        ("/some where/größe.py:x", "größe-x"),
        ("C:/x.py", "x"),
    ],
)
def test_the_default_name_of_a_run_is_that_of_its_config(spec: str, name: str) -> None:
    assert run_name(spec) == name


def test_a_stored_config_is_read_from_json_and_not_executed(tmp_path: Path) -> None:
    stored = json.dumps(FOUR_HEADS.to_dict())
    path = write(tmp_path / "config.json", stored)
    assert load_config(path) == FOUR_HEADS
    assert list(load_rows(path)) == [""]
    assert mistake(f"{path}:A1") == f"{path} has one config, and no row 'A1'"
    run = write(tmp_path / "run.json", json.dumps({"format": 3, "config": FOUR_HEADS.to_dict()}))
    assert load_config(run) == FOUR_HEADS
    for text in ("", "{", "[]", "[" * 10**5, '{"model": {"num_haeds": 1}}', "CONFIG = 1"):
        write(tmp_path / "config.json", text)
        assert mistake(path).startswith(f"{path} is not a config: ")


def test_a_json_config_can_have_windows_line_endings_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = json.dumps(Config().change(model={"d_ff": 32}).to_dict(), indent=1)
    (tmp_path / "x.json").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert load_config(str(tmp_path / "x.json")).model.d_ff == 32
