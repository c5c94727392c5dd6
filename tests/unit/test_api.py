"""Test that Python functions train, resume, evaluate, sweep, and report like the commands."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from example_configs import SMALL, metrics_of

import transformer_jax as tj
from transformer_jax.analysis.head_importance import mask_heads
from transformer_jax.api import read_rows
from transformer_jax.config.loading import import_file
from transformer_jax.files import read_json, write_json
from transformer_jax.inference.translate import check_text
from transformer_jax.progress import Note
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.sweeps.plan import plan_sweep

CONFIG = SMALL.change(train={"steps": 4, "checkpoint_every": 2})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[tj.Run, list[dict[str, float]]]:
    """Return a run, and the reports that its callback received."""
    reports: list[dict[str, float]] = []
    path = tmp_path_factory.mktemp("runs") / "small"
    return tj.train(CONFIG, path, callback=reports.append, quiet=True), reports


def test_a_callback_receives_what_the_metrics_file_contains(
    trained: tuple[tj.Run, list[dict[str, float]]],
) -> None:
    run, reports = trained
    lines = metrics_of(run.folder.path)
    assert len(lines) == 4
    assert [report["step"] for report in reports] == [line["step"] for line in lines]
    for report, line in zip(reports, lines, strict=True):
        split = line.pop("split")
        assert {"step": report["step"]}.items() <= line.items()
        assert {f"{split}/{k}": v for k, v in line.items() if k != "step"}.items() <= report.items()


def test_a_run_resumes_only_with_its_own_config(
    trained: tuple[tj.Run, list[dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained[0].folder.path
    with pytest.raises(tj.UsageError, match="already exists: resume it with"):
        tj.train(CONFIG, path)
    again = tj.train(CONFIG, path, resume=True)
    assert "already at step 4: nothing to do" in capsys.readouterr().out
    assert again.step == 4
    with pytest.raises(tj.ConfigError, match=r"resume with changes in model.num_heads 2 -> 1$"):
        tj.train(CONFIG.change(model={"num_heads": 1}), path, resume=True)


def test_resuming_starts_a_run_that_does_not_exist(tmp_path: Path) -> None:
    config = CONFIG.change(train={"steps": 1, "checkpoint_every": 1})
    assert tj.train(config, tmp_path / "run", resume=True, quiet=True).step == 1
    longer = config.change(train={"steps": 2})
    assert tj.train(longer, str(tmp_path / "run"), resume=True, quiet=True).step == 2
    assert RunFolder.open(tmp_path / "run").config.train.steps == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forget_parts")
def test_resuming_notes_once_that_a_file_of_parts_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    code = "import jax, transformer_jax\n"
    file.write_text(code + 'transformer_jax.register("model.activation", "mine")(jax.nn.relu)\n')
    import_file(str(file))
    short = {"steps": 1, "checkpoint_every": 1}
    config = CONFIG.change(model={"activation": "mine"}, train=short)
    path = tj.train(config, tmp_path / "run", quiet=True).folder.path
    description = read_json(path / "run.json")
    description["parts"]["model.activation"]["sha256"] = "0" * 64
    write_json(path / "run.json", description)
    for steps in (2, 3):
        with pytest.warns(Note) as notes:
            tj.train(config.change(train={"steps": steps}), path, resume=True, quiet=True)
        assert [str(note.message).split(":")[0] for note in notes] == [
            f"mine.py, which defines model.activation mine, has changed since {path} was created"
        ]


def test_an_evaluation_of_a_run_scores_its_test_set(
    trained: tuple[tj.Run, list[dict[str, float]]],
) -> None:
    run, _ = trained
    evaluation = run.evaluate(beam_size=1)
    assert evaluation.result["split"] == "test"
    assert evaluation.hypotheses == run.translate(evaluation.sources, beam_size=1)
    assert re.fullmatch(
        r"Evaluation\(test set: perplexity \d+\.\d{3}, BLEU \d+\.\d\d, 40 lines\)", repr(evaluation)
    )
    assert not (run.folder.path / "evaluations").exists()


@pytest.mark.parametrize("line", [None, 2.5, float("nan"), b"text"])
def test_a_line_that_is_not_text_is_named(line: Any) -> None:
    with pytest.raises(tj.UsageError, match=r"^line 2 must be a string, got "):
        check_text("line 2", line)


@pytest.mark.exhaustive
def test_a_sweep_and_its_report_are_those_of_the_commands(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = {"base": CONFIG, "null": CONFIG.change(model={"d_ff": 8})}
    sweep = tj.sweep(rows, tmp_path / "sweep", seeds=1, quiet=True)
    assert [run.name for run in sweep.runs] == ["base/seed-0", "null/seed-0"]
    report = tj.report(tmp_path / "sweep")
    frame = report.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert set(frame["row"]) == {"null"}
    assert len(report.to_pandas(per_run=True)) == 2
    assert "null" in str(report)
    assert (report.save() / "index.html").exists()


def test_rows_can_be_configs_or_files() -> None:
    rows = read_rows({"a": CONFIG, "b": tj.Row(CONFIG)})
    assert rows == {"a": tj.Row(CONFIG), "b": tj.Row(CONFIG)}
    assert list(read_rows("heads")) == list(tj.load_rows("heads"))
    with pytest.raises(tj.UsageError, match="define row"):
        read_rows(["table3", "table3_multi30k"])


def test_two_files_with_the_same_name_are_named_in_the_error(tmp_path: Path) -> None:
    for folder, d_k in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        text = (
            f"from transformer_jax import Config\nCONFIG = Config().change(model={{'d_k': {d_k}}})"
        )
        (tmp_path / folder / "mine.py").write_text(text)
    with pytest.raises(tj.UsageError, match=r"define row 'mine' differently"):
        read_rows([str(tmp_path / folder / "mine.py") for folder in ("a", "b")])


def test_an_error_names_the_argument_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(tj.UsageError, match=r"already exists: .* `path='.*-2'`"):
        tj.train(CONFIG, tmp_path)
    plan_sweep(tmp_path / "old", {"a": tj.Row(CONFIG)}, 1).store()
    with pytest.raises(tj.UsageError, match=r"choose another folder \(path='FOLDER'\)"):
        tj.sweep({"a": CONFIG.change(model={"d_k": 2})}, tmp_path / "old")


def test_a_field_without_a_section_does_not_exist() -> None:
    with pytest.raises(tj.ConfigError, match="d_k"):
        CONFIG.with_fields({"d_k": 8})


def test_a_config_prints_its_differences_from_base_and_its_code() -> None:
    config = tj.Config().change(model={"num_heads": 4}, data={"languages": ("en", "fr")})
    assert str(config) == (
        "the paper's base model, except\n"
        "  model.num_heads: 4 (base: 8)\n"
        "  data.languages: ['en', 'fr'] (base: ['en', 'de'])"
    )
    assert str(tj.Config()) == "the paper's base model"
    assert eval(repr(config), {"Config": tj.Config}) == config  # noqa: S307 - our own code


def test_public_functions_name_a_wrong_argument_in_one_line(
    trained: tuple[tj.Run, list[dict[str, float]]], tmp_path: Path
) -> None:
    run, path, wrong = trained[0], tmp_path / "new", cast("Any", 5)
    calls: dict[str, Callable[[], object]] = {
        "path must be a string or a path, got None": lambda: tj.load(cast("Any", None)),
        "average_checkpoints must be an integer or None, got '2'": lambda: tj.load(
            path, average_checkpoints=cast("Any", "2")
        ),
        "config must be a Config or a string, got 5": lambda: tj.train(wrong, path),
        "callback must be a function or None, got 5": lambda: tj.train(
            CONFIG, path, callback=wrong
        ),
        "configs must be a string or a list of strings or a dictionary (a string and a Config or a "
        "Row), got 5 at configs['a']": lambda: tj.sweep({"a": wrong}, path),
        "rows must be a list of strings or None, got 'a'": lambda: tj.sweep("tiny", path, rows="a"),
        "tune must be a pair (a string and a list (True or False or an integer or a number or a "
        "string or None)) or None, got 5 at tune[1]": lambda: tj.sweep(
            "tiny", path, tune=("model.d_k", wrong)
        ),
        "a sweep needs at least one row": lambda: tj.sweep({}, path),
        "split must be 'dev' or 'test' or None, got 'tset'": lambda: run.evaluate(
            cast("Any", "tset")
        ),
        "unknown field 'sampling' of decode": lambda: run.evaluate(sampling=tj.Sampling()),
        "unknown field 'bean_size' of decode; did you mean 'beam_size'?": lambda: run.translate(
            ["one"], bean_size=2
        ),
        "translate_best cannot be called: multiple values for argument 'num_best'": (
            lambda: run.translate(["one"], num_best=2)
        ),
        "lines must be a list of strings, got 'one'": lambda: run.translate("one"),
        "split must be 'dev' or 'test' or None, got an object of type ndarray": (
            lambda: run.evaluate(cast("Any", np.array(["dev", "test"])))
        ),
        "model.dtype must be one of 'float32', 'bfloat16', 'float64', got array(['a', 'b'], "
        "dtype='<U1')": lambda: CONFIG.change(model={"dtype": np.array(["a", "b"])}),
        "heads must be a list of integers or None, got 1.5 at heads[0]": (
            lambda: run.align(["one"], ["eins"], heads=cast("Any", [1.5]))
        ),
        "mask must be an array of shape (3, L, H), got 5": lambda: mask_heads(run.params, wrong),
        "runs must be a list of Runs, got 5 at runs[0]": lambda: tj.ensemble([wrong]),
        "gold must be a list of strings, got 5": lambda: tj.alignment_error_rate(["0-0"], wrong),
        "model must be a dictionary of fields, got 5": lambda: CONFIG.change(model=wrong),
    }
    for message, call in calls.items():
        with pytest.raises(tj.UsageError) as error:
            call()
        assert str(error.value) == message
    assert not path.exists()


def test_every_public_function_rejects_unknown_arguments() -> None:
    functions = [getattr(tj, name) for name in tj.__all__]
    functions = [f for f in functions if inspect.isfunction(f) and f is not tj.register]
    assert tj.train in functions
    functions += [getattr(tj.Run, name) for name in ("score", "align")]
    for function in functions:
        with pytest.raises(tj.UsageError, match=f"{function.__name__} cannot be called: "):
            function(no_such_argument=1)
    hint = "unexpected keyword argument 'sedes'; did you mean 'seeds'?"
    with pytest.raises(tj.UsageError, match=re.escape(hint)):
        cast("Any", tj.sweep)("tiny", "x", sedes=1)


def test_every_exported_name_exists() -> None:
    for package in (tj, tj.model, tj.data, tj.training):
        assert all(getattr(package, name) is not None for name in package.__all__)
    assert dir(tj) == sorted(tj.__all__)
