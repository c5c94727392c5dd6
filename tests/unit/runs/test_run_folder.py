import math
import os
import shlex
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from transformer_jax import registry
from transformer_jax.config import Config
from transformer_jax.config.loading import IMPORTS, import_file
from transformer_jax.console import format_for_shell
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import ConfigError, StorageError, UsageError
from transformer_jax.files import read_json, write_json
from transformer_jax.runs import FORMAT
from transformer_jax.runs.run_folder import RunFolder, check_available

CONFIG = Config().change(model={"num_heads": 4}, train={"seed": 3, "clip_norm": 1.0})
TOKENIZER = Tokenizer.train(["one two three", "eins zwei drei"], 24)
OTHER = Tokenizer.train(["one two three", "eins zwei drei"], 23)


def create(path: Path) -> RunFolder:
    return RunFolder.create(path, CONFIG, Vocabulary.share(TOKENIZER), "f1a9")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the description (`run.json`) of a run."""
    description = read_json(path / "run.json")
    change(description)
    write_json(path / "run.json", description)


def test_a_new_run_contains_only_its_description_and_its_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "größe 1"
    assert create(path).path == path
    assert list(path.parent.iterdir()) == [path]
    assert set(files(path)) == {"run.json", "tokenizer.model"}
    assert (path / "tokenizer.model").read_bytes() == TOKENIZER.model
    described = read_json(path / "run.json")
    assert described["config"] == CONFIG.to_dict()
    assert described["vocabulary"] == {"size": 24, "sha256": TOKENIZER.digest}
    assert {"python", "jax", "flax", "transformer-jax"} <= set(described["versions"])


def test_a_run_can_be_moved_and_opened(tmp_path: Path) -> None:
    create(tmp_path / "run").path.rename(tmp_path / "moved")
    opened = RunFolder.open(tmp_path / "moved")
    assert opened.config == CONFIG
    assert opened.vocabulary.target.model == TOKENIZER.model
    assert opened.fingerprint == "f1a9"
    assert opened.checkpoints == tmp_path / "moved" / "checkpoints"
    assert str(tmp_path) not in (tmp_path / "moved" / "run.json").read_text("utf-8")


def test_a_run_can_be_opened_while_another_process_changes_its_checkpoints(tmp_path: Path) -> None:
    path = create(tmp_path / "run").path
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            (path / "checkpoints" / "1" / "params" / "d").mkdir(parents=True)
            shutil.rmtree(path / "checkpoints" / "1")

    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(train)
        try:
            for _ in range(100):
                assert RunFolder.open(path).config == CONFIG
        finally:
            is_over.set()
        trainer.result()


def test_a_run_has_the_permissions_of_any_other_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    path = create(tmp_path / "run").path
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_empty_folder_becomes_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    create(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").config == CONFIG
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


@pytest.mark.parametrize("name", ["run", 'my run; $HOME\'s "largest"'])
def test_a_run_is_never_overwritten(name: str, tmp_path: Path) -> None:
    path = create(tmp_path / name).path
    (tmp_path / f"{name}-2").mkdir()
    before = files(tmp_path)
    with pytest.raises(UsageError) as caught:
        RunFolder.create(path, Config(), Vocabulary.share(OTHER), "other")
    resume, out = (shlex.split(part) for part in format_for_shell(caught.value).split("`")[1::2])
    assert resume == ["transformer-jax", "resume", str(path)]
    assert out == ["--out", str(tmp_path / f"{name}-3")]
    assert "--out" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_path_that_is_not_a_run_is_never_overwritten(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "lr-0.5"
    if kind == "folder":
        path.mkdir()
    (path / "notes" if kind == "folder" else path).write_text("mine")
    before = files(tmp_path)
    with pytest.raises(UsageError) as caught:
        create(path)
    assert f"--out {tmp_path / 'lr-0.5-2'}" in format_for_shell(caught.value)
    assert "resume" not in str(caught.value)
    assert files(tmp_path) == before


@pytest.mark.parametrize("place", [".", "..", "../here"])
def test_the_suggested_path_is_next_to_the_existing_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="already exists") as caught:
        check_available(Path(place))
    suggested = Path(format_for_shell(caught.value).split("--out ")[1].rstrip("`"))
    check_available(suggested)
    assert suggested.resolve().parent == Path(place).resolve().parent


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # The temporary folder has a longer name than the run, so a name of 250 bytes is also too long.
    expected = {"file/run": StorageError, "a" * 300: UsageError, "a" * 250: UsageError}
    for name, error in expected.items():
        with pytest.raises(error) as caught:
            create(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), StorageError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError(), RuntimeError),
    ],
)
def test_an_error_during_creation_leaves_no_file(
    error: BaseException, expected: type[BaseException], tmp_path: Path
) -> None:
    def fail() -> None:
        vocabulary = Vocabulary.share(TOKENIZER)
        with RunFolder.build(tmp_path / "run", CONFIG, vocabulary, "f1a9") as folder:
            assert (folder.path / "run.json").exists()
            raise error

    with pytest.raises(expected):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["nowhere", "file", "folder", "folder/nowhere", "a" * 300])
def test_a_path_that_is_not_a_run_is_an_error(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        RunFolder.open(tmp_path / place)
    assert str(caught.value).startswith(f"{tmp_path / place} is not a run")


def test_an_error_names_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = create(tmp_path / "run").path
    (path / "tokenizer.model").unlink()
    message = rf"^{path}/tokenizer\.model cannot be read: No such file or directory$"
    with pytest.raises(StorageError, match=message):
        RunFolder.open(path)


@pytest.mark.parametrize("other", [FORMAT - 1, 99])
def test_a_run_of_another_format_is_rejected_in_one_line(tmp_path: Path, other: int) -> None:
    path = create(tmp_path / "run").path
    rewrite(path, lambda run: run.update(format=other))
    with pytest.raises(UsageError, match=f"{path} has format {other}, .* only format {FORMAT}$"):
        RunFolder.open(path)


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: (path / "run.json").write_text(""),
    "truncated": lambda path: (path / "run.json").write_text('{"format": 1, "conf'),
    "invalid UTF-8": lambda path: (path / "run.json").write_bytes(b'{"format": "\xff"}'),
    "a list": lambda path: (path / "run.json").write_text("[]"),
    "a word as format": lambda path: rewrite(path, lambda run: run.update(format="one")),
    "infinity as format": lambda path: rewrite(path, lambda run: run.update(format=math.inf)),
    "a list as config": lambda path: rewrite(path, lambda run: run.update(config=[])),
    "an unknown field": lambda path: rewrite(
        path, lambda run: run["config"]["model"].update(num_haeds=4)
    ),
    "a value out of range": lambda path: rewrite(
        path, lambda run: run["config"]["model"].update(d_k=0)
    ),
    "a section named self": lambda path: rewrite(path, lambda run: run["config"].update(self={})),
    "no tokenizer": lambda path: (path / "tokenizer.model").unlink(),
    "a broken tokenizer": lambda path: (path / "tokenizer.model").write_bytes(b"broken"),
    "another tokenizer": lambda path: (path / "tokenizer.model").write_bytes(OTHER.model),
    **{
        f"no {key}": lambda path, key=key: rewrite(path, lambda run: run.pop(key))
        for key in ("format", "config", "vocabulary", "data")
    },
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_run_whose_files_do_not_match_is_an_error_that_names_it(
    fault: str, tmp_path: Path
) -> None:
    path = create(tmp_path / "run").path
    BROKEN[fault](path)
    with pytest.raises(StorageError) as caught:
        RunFolder.open(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_changed_config_is_stored_with_the_run(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    longer = CONFIG.change(train={"steps": 7})
    changed = run.with_config(longer)
    assert changed.config == longer
    assert RunFolder.open(tmp_path / "run").config == CONFIG
    changed.store()
    opened = RunFolder.open(tmp_path / "run")
    assert opened.config == longer
    assert (opened.vocabulary.target.model, opened.fingerprint) == (TOKENIZER.model, "f1a9")
    assert set(files(tmp_path / "run")) == {"run.json", "tokenizer.model"}


def test_a_change_that_makes_a_different_experiment_is_rejected(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cannot resume with changes in train.seed 3 -> 4$"):
        run.with_config(CONFIG.change(train={"seed": 4, "steps": 7}))
    (run.checkpoints / "8").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"train.steps must be at least 8, .* got 7$"):
        run.with_config(CONFIG.change(train={"steps": 7}))


def test_a_full_disk_leaves_the_old_config_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "run")
    before = files(run.path)

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match="No space left on device"):
        run.with_config(CONFIG.change(train={"steps": 7})).store()
    assert files(run.path) == before


@pytest.mark.parametrize("name", ["²", "٣", "bad-8", ".9", "x"])
def test_only_ascii_digits_name_a_checkpoint(name: str, tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    for step in (name, "7"):
        (run.checkpoints / step).mkdir(parents=True)
    assert run.steps_done == 7


PART = """
import transformer_jax
transformer_jax.register("model.activation", "twice")(lambda x: 2 * x)
transformer_jax.register("train.schedule", "flat")(lambda config, peak: lambda step: peak)
"""


def import_part(file: Path, code: str) -> None:
    """Register the parts in a file, as a new process does."""
    for field in ("model.activation", "train.schedule"):
        for name in registry.foreign_names(field):
            del registry._parts[field][name]
    registry._digests.clear()
    os.environ[IMPORTS] = ""
    file.write_text(code, encoding="utf-8")
    import_file(str(file))


def create_with_parts(tmp_path: Path, **config: dict[str, Any]) -> RunFolder:
    import_part(tmp_path / "my_part.py", PART)
    changed = CONFIG.change(**config)
    return RunFolder.create(tmp_path / "run", changed, Vocabulary.share(TOKENIZER), "f1a9")


@pytest.mark.usefixtures("forget_parts")
def test_a_run_whose_part_is_not_registered_names_the_file_to_import(tmp_path: Path) -> None:
    run = create_with_parts(tmp_path, model={"activation": "twice"})
    assert RunFolder.open(run.path).config == run.config
    del registry._parts["model.activation"]["twice"]
    with pytest.raises(UsageError) as error:
        RunFolder.open(run.path)
    assert str(error.value) == (
        f"{run.path} uses model.activation 'twice', which my_part.py registers: import my_part.py "
        "first (on the command line: --import, followed by its path)"
    )


@pytest.mark.usefixtures("forget_parts")
def test_all_files_to_import_are_named_at_once(tmp_path: Path) -> None:
    described = [
        {"model.norm": {"name": "a", "file": "norms.py"}, "train.loss": {"name": "b"}},
        {"model.norm": {"name": "a", "file": "norms.py"}},
        {"data.corpus": {"name": "c", "file": "texts.py"}},
    ]
    with pytest.raises(UsageError) as error:
        registry.check_registered(tmp_path, *described)
    assert str(error.value) == (
        f"{tmp_path} uses model.norm 'a', data.corpus 'c', which norms.py and "
        "texts.py register: import norms.py and texts.py first (on the command line: --import, "
        "followed by the path of each)"
    )


@pytest.mark.usefixtures("forget_parts")
def test_a_part_of_a_notebook_must_be_defined_again(tmp_path: Path) -> None:
    exec(compile(PART, "<cell 1>", "exec"), {})  # noqa: S102 - the code is this file's
    config = CONFIG.change(model={"activation": "twice"})
    run = RunFolder.create(tmp_path / "run", config, Vocabulary.share(TOKENIZER), "f1a9")
    del registry._parts["model.activation"]["twice"]
    rule = "was registered in a notebook or a terminal: define it again first$"
    with pytest.raises(UsageError, match=f"uses model.activation 'twice', which {rule}"):
        RunFolder.open(run.path)


@pytest.mark.usefixtures("forget_parts")
def test_a_changed_file_is_one_line_even_if_it_defines_several_parts(tmp_path: Path) -> None:
    parts = {"model": {"activation": "twice"}, "train": {"schedule": "flat"}}
    run = create_with_parts(tmp_path, **parts)
    assert run.changed_files == []
    import_part(tmp_path / "my_part.py", PART + "\n")
    [change] = RunFolder.open(run.path).changed_files
    defined = "model.activation twice and train.schedule flat"
    start = f"my_part.py, which defines {defined}, has changed since {run.path} was created: sha256"
    assert change.startswith(start)


@pytest.mark.usefixtures("forget_parts")
def test_a_run_keeps_the_digests_of_the_files_that_it_was_created_with(tmp_path: Path) -> None:
    run = create_with_parts(tmp_path, model={"activation": "twice"})
    before = read_json(run.path / "run.json")["parts"]
    import_part(tmp_path / "my_part.py", PART + "\n")
    stored = RunFolder.open(run.path)
    longer = stored.with_config(stored.config.change(train={"log_every": 7}))
    longer.store()
    description = read_json(run.path / "run.json")
    assert description["config"]["train"]["log_every"] == 7
    assert description["parts"] == before
    assert RunFolder.open(run.path).changed_files == stored.changed_files != []


@pytest.mark.parametrize("parts", [[], "x", {"model.norm": "x"}, {"model.norm": {}}])
def test_invalid_descriptions_of_parts_are_rejected(parts: object, tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    rewrite(run.path, lambda description: description.update(parts=parts))
    with pytest.raises(StorageError, match=r"run\.json"):
        RunFolder.open(run.path)
