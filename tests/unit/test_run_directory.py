"""A run's folder appears whole, is never overwritten, and says what is wrong with it."""

import json
import shlex
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from transformer_jax.config import Config
from transformer_jax.data.tokenizer import Tokenizer, Vocabulary
from transformer_jax.errors import StorageError, TransformerJaxError, UsageError
from transformer_jax.runs import run_directory as folder_module
from transformer_jax.runs.run_directory import RunDirectory, check_available

CONFIG = Config().change(model={"num_heads": 4}, train={"seed": 3, "clip_norm": 1.0})
TOKENIZER = Tokenizer.train(["one two three", "eins zwei drei"], 24)
OTHER = Tokenizer.train(["one two three", "eins zwei drei"], 23)


def create(path: Path) -> RunDirectory:
    return RunDirectory.create(path, CONFIG, Vocabulary.shared(TOKENIZER), "f1a9")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the description of a run in place."""
    description = json.loads((path / "run.json").read_text("utf-8"))
    change(description)
    (path / "run.json").write_text(json.dumps(description), "utf-8")


def test_a_run_appears_with_all_that_describes_it_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "größe 1"
    made = create(path)
    assert made.path == path
    assert list(path.parent.iterdir()) == [path]
    assert set(files(path)) == {"run.json", "tokenizer.model"}
    assert (path / "tokenizer.model").read_bytes() == TOKENIZER.model
    described = json.loads((path / "run.json").read_text("utf-8"))
    assert described["config"] == CONFIG.to_dict()
    assert described["vocabulary"] == {"size": 24, "sha256": TOKENIZER.digest}
    assert {"python", "jax", "flax", "transformer-jax"} <= set(described["versions"])


def test_a_run_that_is_opened_is_the_one_that_was_made(tmp_path: Path) -> None:
    create(tmp_path / "run")
    opened = RunDirectory.open(tmp_path / "run")
    assert opened.config == CONFIG
    assert opened.vocabulary.target.model == TOKENIZER.model
    assert opened.fingerprint == "f1a9"


def test_a_run_may_be_moved(tmp_path: Path) -> None:
    create(tmp_path / "run").path.rename(tmp_path / "moved")
    opened = RunDirectory.open(tmp_path / "moved")
    assert opened.config == CONFIG
    assert opened.checkpoints == tmp_path / "moved" / "checkpoints"
    assert str(tmp_path) not in (tmp_path / "moved" / "run.json").read_text("utf-8")


def test_a_run_may_be_opened_while_a_trainer_makes_and_removes_checkpoints(tmp_path: Path) -> None:
    path = create(tmp_path / "run").path
    ends = threading.Event()

    def train() -> None:
        while not ends.is_set():
            (path / "checkpoints" / "1" / "params" / "d").mkdir(parents=True)
            shutil.rmtree(path / "checkpoints" / "1")

    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(train)
        try:
            for _ in range(300):
                assert RunDirectory.open(path).config == CONFIG
        finally:
            ends.set()
        trainer.result()


def test_a_run_may_be_read_by_whoever_may_read_other_folders(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    path = create(tmp_path / "run").path
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_empty_folder_that_is_there_becomes_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    create(tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").config == CONFIG
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


@pytest.mark.parametrize("name", ["run", 'my run; $HOME\'s "largest"'])
def test_a_run_is_never_overwritten(name: str, tmp_path: Path) -> None:
    path = create(tmp_path / name).path
    (tmp_path / f"{name}-2").mkdir()
    before = files(tmp_path)
    with pytest.raises(UsageError) as told:
        RunDirectory.create(path, Config(), Vocabulary.shared(OTHER), "other")
    first, second = (shlex.split(part) for part in str(told.value).split("`")[1::2])
    assert first == ["transformer-jax", "resume", str(path)]
    assert second == ["--out", str(tmp_path / f"{name}-3")]
    assert "\n" not in str(told.value)
    assert files(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_run_is_never_overwritten_and_cannot_be_resumed(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine"
    if kind == "folder":
        path.mkdir()
    (path / "notes" if kind == "folder" else path).write_text("mine")
    before = files(tmp_path)
    with pytest.raises(UsageError) as told:
        create(path)
    assert f"--out {tmp_path / 'mine-2'}" in str(told.value)
    assert "resume" not in str(told.value)
    assert files(tmp_path) == before


@pytest.mark.parametrize("place", [".", "..", "../here"])
def test_another_folder_is_proposed_beside_the_one_that_is_there(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="is there already") as told:
        check_available(Path(place))
    proposed = Path(str(told.value).split("--out ")[1].rstrip("`"))
    check_available(proposed)
    assert proposed.resolve().parent == Path(place).resolve().parent


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / ("a" * 300)):
        with pytest.raises(StorageError) as told:
            create(path)
        assert str(path) in str(told.value)
        assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), StorageError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError(), RuntimeError),
    ],
)
def test_a_run_that_could_not_be_made_leaves_nothing(
    error: BaseException,
    told: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_path: Path, _content: object) -> None:
        raise error

    monkeypatch.setattr(folder_module, "write_json", fail)
    with pytest.raises(told):
        create(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["nowhere", "file", "folder", "folder/nowhere", "a" * 300])
def test_what_is_no_run_is_told(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as told:
        RunDirectory.open(tmp_path / place)
    assert str(told.value).startswith(f"{tmp_path / place} is no run")


def test_a_run_of_another_format_is_told_with_both_formats(tmp_path: Path) -> None:
    path = create(tmp_path / "run").path
    rewrite(path, lambda run: run.update(format=99))
    with pytest.raises(UsageError, match=f"{path} has format 99, .* reads {folder_module.FORMAT}"):
        RunDirectory.open(path)


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: (path / "run.json").write_text(""),
    "cut off": lambda path: (path / "run.json").write_text('{"format": 1, "conf'),
    "no UTF-8": lambda path: (path / "run.json").write_bytes(b'{"format": "\xff"}'),
    "a list": lambda path: (path / "run.json").write_text("[]"),
    "a word as format": lambda path: rewrite(path, lambda run: run.update(format="one")),
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
def test_a_run_whose_parts_do_not_fit_is_told_with_its_path(fault: str, tmp_path: Path) -> None:
    path = create(tmp_path / "run").path
    BROKEN[fault](path)
    with pytest.raises(TransformerJaxError) as told:
        RunDirectory.open(path)
    assert isinstance(told.value, StorageError)
    assert str(path) in str(told.value)
    assert "\n" not in str(told.value)


def test_another_config_is_stored_with_the_run(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    longer = CONFIG.change(train={"steps": 7})
    changed = run.with_config(longer)
    assert changed.config == longer
    assert RunDirectory.open(tmp_path / "run").config == CONFIG
    changed.store()
    opened = RunDirectory.open(tmp_path / "run")
    assert opened.config == longer
    assert (opened.vocabulary.target.model, opened.fingerprint) == (TOKENIZER.model, "f1a9")
    assert set(files(tmp_path / "run")) == {"run.json", "tokenizer.model"}


def test_reports_of_later_steps_and_a_line_that_was_cut_off_are_forgotten(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    kept = [{"step": step, "split": "train", "loss": 0.5} for step in (10, 20, 20)]
    lines = [json.dumps(line) + "\n" for line in [*kept, {"step": 30, "split": "dev"}]]
    run.metrics.write_text("".join(lines) + '{"step": 1', "utf-8")
    run.truncate_metrics(20, {"train": 1, "dev": 1})
    text = run.metrics.read_text("utf-8")
    assert text.endswith("\n")
    assert [json.loads(line) for line in text.split("\n")[:-1]] == kept
    run.truncate_metrics(0, {"train": 1, "dev": 1})
    assert run.metrics.read_text("utf-8") == ""
    assert set(files(run.path)) == {"run.json", "tokenizer.model", "metrics.jsonl"}


# What a power cut leaves of reports, or a stranger.
NO_REPORTS = {
    "zeros": bytes(64) + b"\n",
    "zeros without end": bytes(64),
    "half a line, and zeros": b'{"step": 20, "spl' + bytes(64) + b"\n\n",
    "a long line": b"0" * (folder_module.MAX_LINE + 9) + b"\n",
    "no UTF-8": b'{"step": 20, "\xff": 1}\n',
    "a deep line": b"[" * 10**5 + b"\n",
    "no object": b"[20]\n",
    "no step": b"{}\n",
    "no number": b'{"step": -Infinity, "split": "dev"}\n',
    "no split": b'{"step": 20}\n',
}


@pytest.mark.parametrize("name", NO_REPORTS)
def test_what_is_no_report_is_forgotten_at_the_end_and_refused_before(
    name: str, tmp_path: Path
) -> None:
    run = create(tmp_path / "run")
    ten, twenty, thirty = (b'{"step": %d, "split": "dev"}\n' % step for step in (10, 20, 30))
    for later in (b"", thirty):
        run.metrics.write_bytes(ten + twenty + NO_REPORTS[name] + later)
        run.truncate_metrics(20, {"train": 1, "dev": 1})
        assert run.metrics.read_bytes() == ten + twenty
    if name != "zeros without end":
        before = ten + NO_REPORTS[name] + twenty
        run.metrics.write_bytes(before)
        with pytest.raises(StorageError, match=r"metrics.jsonl has no report in line 2:"):
            run.truncate_metrics(20, {"train": 1, "dev": 1})
        assert run.metrics.read_bytes() == before


def test_a_full_disk_leaves_the_old_content_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "run")
    before = files(run.path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        run.with_config(CONFIG.change(train={"steps": 7})).store()
    assert files(run.path) == before


@pytest.mark.parametrize("name", ["²", "٣", "bad-8", ".9", "x"])
def test_only_a_number_of_ours_names_a_checkpoint(name: str, tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    for step in (name, "7"):
        (run.checkpoints / step).mkdir(parents=True)
    assert run.steps_done == 7


def test_a_run_without_reports_has_none_to_forget(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    run.truncate_metrics(3, {"train": 1, "dev": 1})
    assert not run.metrics.exists()
