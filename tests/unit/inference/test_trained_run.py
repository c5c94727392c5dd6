import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from example_configs import SMALL
from oracles import floats
from run_files import write_untrained_run

import transformer_jax
from transformer_jax import registry
from transformer_jax.config.loading import IMPORTS, import_file
from transformer_jax.console import format_for_shell
from transformer_jax.errors import ConfigError, DataError, StorageError, UsageError
from transformer_jax.files import read_json, write_json
from transformer_jax.inference import trained_run
from transformer_jax.inference.trained_run import Run, load, load_averages, read_params
from transformer_jax.progress import Note
from transformer_jax.runs import checksums
from transformer_jax.runs.checkpoint_averaging import select_steps
from transformer_jax.runs.checkpoint_manager import CheckpointManager
from transformer_jax.runs.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load(write_untrained_run(tmp_path_factory.mktemp("runs") / "run").path)


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Path:
    """A copy of the run that tests may modify."""
    return Path(shutil.copytree(run.folder.path, tmp_path / "copy with a space"))


def largest_difference(one: Run, other: Run) -> float:
    differences = jax.tree.map(lambda a, b: float(abs(a - b).max()), one.params, other.params)
    return max(jax.tree.leaves(differences))


def test_loading_a_copy_gives_the_same_run_and_changes_no_file(run: Run, copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    loaded = transformer_jax.load(copy)
    assert largest_difference(loaded, run) == 0
    assert loaded.config == run.config
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_runs_can_be_compared_and_hashed(run: Run) -> None:
    other = dataclasses.replace(run, params=jax.tree.map(lambda x: x + 1, run.params))
    assert run != other
    assert [other, run].index(run) == 1
    assert len({run, other, run}) == 2


def test_the_repr_is_short(run: Run) -> None:
    count = sum(x.size for x in jax.tree.leaves(run.params))
    assert repr(run) == f"Run({str(run.folder.path)!r}, step=8, {count:,} parameters)"


def test_a_run_shows_its_metrics_as_a_table_a_picture_and_a_summary(run: Run, copy: Path) -> None:
    reports = [{"step": s, "split": "dev", "perplexity": 8.0 / s} for s in (1, 2)]
    (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in reports))
    copied = dataclasses.replace(run, folder=RunFolder.open(copy))
    expected = [{"step": 1, "dev/perplexity": 8.0}, {"step": 2, "dev/perplexity": 4.0}]
    assert copied.metrics == expected
    [axes] = copied.plot_curves().figure.axes
    assert floats(axes.lines[0].get_ydata()).tolist() == [8.0, 4.0]
    page = copied._repr_html_()
    assert f"step 8, {run.num_parameters:,} parameters" in page
    assert "dev/perplexity" in page
    assert run.metrics == []
    shutil.rmtree(copy)
    assert "no metrics" in copied._repr_html_()
    with pytest.raises(StorageError, match="it was moved or deleted, or the working directory"):
        _ = copied.metrics


def test_an_average_is_loaded_on_request(run: Run) -> None:
    mean = load(run.folder.path, average_checkpoints=2)
    assert (mean.average_checkpoints, mean.steps, mean.step) == (2, (4, 8), 8)
    assert largest_difference(mean, run) > 0
    with pytest.raises(UsageError, match="cannot average 3 checkpoints"):
        load(run.folder.path, average_checkpoints=3)
    for average in (0, -1):
        with pytest.raises(UsageError, match=f"cannot average {average} checkpoints") as caught:
            load(run.folder.path, average_checkpoints=average)
        assert format_for_shell(caught.value).endswith("pass --average-checkpoints 1")


def write_config(path: Path, **sections: dict[str, Any]) -> None:
    """Change config fields in a run's `run.json`."""
    description = read_json(path / "run.json")
    for section, fields in sections.items():
        description["config"][section] |= fields
    write_json(path / "run.json", description)


def test_by_default_a_run_with_few_checkpoints_averages_them_and_warns(copy: Path) -> None:
    write_config(copy, decode={"average_checkpoints": 3})
    with pytest.warns(Note, match=r"not have 3 checkpoints .* so the mean of 2 is used$"):
        assert load(copy).steps == (4, 8)
    assert load(copy, average_checkpoints=2).steps == (4, 8)
    with pytest.warns(Note, match="so only the one at step 4 is used"):
        assert load(copy, step=4).steps == (4,)
    with pytest.raises(UsageError, match="cannot average 3 checkpoints"):
        load(copy, average_checkpoints=3)


def test_by_default_a_run_without_scheduled_checkpoints_loads_its_newest(copy: Path) -> None:
    write_config(copy, decode={"average_checkpoints": 3})
    for path in (copy / "checkpoints").glob("*/checkpoint.json"):
        metadata = json.loads(path.read_text())
        path.write_text(json.dumps(metadata | {"perplexity": None}))
        (path.parent / checksums.NAME).unlink()
        checksums.write(path.parent)
    with pytest.warns(Note, match="so only the one at step 8 is used"):
        assert load(copy).steps == (8,)


def test_a_run_can_be_loaded_at_an_earlier_step(run: Run) -> None:
    earlier = load(run.folder.path, step=4)
    assert earlier.steps == (4,)
    assert largest_difference(earlier, run) > 0
    assert largest_difference(load(run.folder.path, step=8), run) == 0
    params = read_params(run.folder, [4])
    assert largest_difference(earlier, dataclasses.replace(run, params=params)) == 0
    with pytest.raises(UsageError, match=r"has no checkpoint at step 6; available steps: 4, 8$"):
        load(run.folder.path, step=6)


def test_a_run_whose_description_names_other_text_is_rejected(copy: Path) -> None:
    description = read_json(copy / "run.json")
    description["data"]["fingerprint"] = "0" * 64
    write_json(copy / "run.json", description)
    with pytest.raises(StorageError, match=r"belongs to another run: data '\w+' -> '0{64}'"):
        load(copy)


def test_a_checkpoint_that_disappears_while_loading_is_replaced_by_a_new_selection(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selections: list[list[int]] = []

    def select_and_delete(
        checkpoints: CheckpointManager, average: int = 1, step: int | None = None
    ) -> list[int]:
        selections.append(select_steps(checkpoints, average, step))
        if selections[-1] == [8]:
            shutil.rmtree(checkpoints.folder / "8")
        return selections[-1]

    monkeypatch.setattr(trained_run, "select_steps", select_and_delete)
    assert load(copy, average_checkpoints=1).step == 4
    assert selections == [[8], [4]]


def test_a_damaged_checkpoint_is_an_error_and_is_not_read_again(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "checkpoints" / "8" / "checkpoint.json").write_text("{}")
    selections: list[list[int]] = []

    def record(*arguments: Any) -> list[int]:
        selections.append(select_steps(*arguments))
        return selections[-1]

    monkeypatch.setattr(trained_run, "select_steps", record)
    with pytest.raises(StorageError, match=r"checkpoint 8 .* is damaged"):
        load(copy, step=8, average_checkpoints=1)
    assert selections == [[8]]


def test_one_line_comes_out_for_each_line_even_if_it_is_blank(run: Run) -> None:
    translations = run.translate(["", "one", "   ", "two", ""], beam_size=1)
    assert [bool(text) for text in translations] == [False, True, False, True, False]
    assert translations[1::2] == run.translate(["one", "two"], beam_size=1)
    assert run.translate([], beam_size=1) == []


def test_invalid_options_of_a_translation_are_errors(run: Run) -> None:
    with pytest.raises(UsageError, match="a beam of 4 cannot return the 5 best") as caught:
        run.translate_best(["one"], 5)
    assert format_for_shell(caught.value).endswith("pass --beam-size 5")
    with pytest.raises(UsageError, match="number of translations must be positive, got 0"):
        run.translate_best(["one"], 0)
    with pytest.raises(ConfigError, match=r"decode.beam_size must be from 1 to 1000"):
        run.translate(["one"], beam_size=0)
    # The parameters are averaged when the run is loaded, so a translation cannot change the number
    # of averaged checkpoints.
    with pytest.raises(UsageError, match=r"load the run with average_checkpoints=2$"):
        run.translate(["one"], average_checkpoints=2)
    with pytest.raises(DataError, match=r"pass truncate=True$") as too_long:
        run.translate(["one", " ".join(["one"] * 200)])
    assert format_for_shell(too_long.value).endswith("pass --truncate")


@pytest.mark.usefixtures("forget_parts")
def test_a_file_that_has_changed_since_the_run_was_created_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my_part.py"
    code = "import jax, transformer_jax\n"
    code += 'transformer_jax.register("model.activation", "mine")(jax.nn.relu)\n'
    file.write_text(code)
    import_file(str(file))
    config = SMALL.change(model={"activation": "mine"})
    path = write_untrained_run(tmp_path / "run", config).path
    assert load(path).folder.changed_files == []

    monkeypatch.setenv(IMPORTS, "")
    del registry._parts["model.activation"]["mine"]
    registry._digests.clear()
    file.write_text(code + "\n")
    import_file(str(file))
    with pytest.warns(Note) as notes:
        load(path)
    [text] = [str(note.message) for note in notes]
    assert text.startswith("my_part.py, which defines model.activation mine, has changed since")
    with pytest.warns(Note) as notes:
        list(load_averages(RunFolder.open(path), [8], [1]))
    assert [str(note.message) for note in notes] == [text]
