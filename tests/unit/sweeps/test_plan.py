"""Test that a sweep's plan is stored, and that rows can be added to it but not changed."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from bucket_servers import BucketServer
from example_configs import SMALL

from transformer_jax import registry
from transformer_jax.config import Paper, Row
from transformer_jax.config.loading import import_file
from transformer_jax.config.rows import with_control
from transformer_jax.console import format_for_shell
from transformer_jax.errors import ConfigError, StorageError, UsageError
from transformer_jax.files import read_json, write_json
from transformer_jax.remote.copies import local_path
from transformer_jax.sweeps.plan import FORMAT, Origin, Sweep, Tuning, choose_folder, plan_sweep

BASE = SMALL.change(data={"max_batch_shapes": 2})
ROWS = {
    "base": Row(BASE, Paper(4.92, 25.8, 65)),
    "wide": Row(BASE.change(model={"num_heads": 1, "d_k": 16, "d_v": 16})),
    "E": Row(BASE.change(model={"positions": "learned"})),
}


def test_one_seed_of_every_row_comes_before_the_next_seed(tmp_path: Path) -> None:
    sweep = plan_sweep(tmp_path / "s", ROWS, 2)
    assert [run.name for run in sweep.runs] == [
        *("base/seed-0", "wide/seed-0", "E/seed-0"),
        *("base/seed-1", "wide/seed-1", "E/seed-1"),
    ]
    assert [run.config.train.seed for run in sweep.runs] == [0, 0, 0, 1, 1, 1]


def test_selected_rows_include_the_first_row() -> None:
    assert list(plan_sweep(Path("s"), ROWS, 1, only=["E"]).rows) == ["base", "E"]
    with pytest.raises(UsageError, match="no row 'F' \\(available: base, wide, E\\)"):
        plan_sweep(Path("s"), ROWS, 1, only=["F"])


def test_a_control_is_a_copy_of_the_first_row_with_its_own_seeds(tmp_path: Path) -> None:
    rows = with_control(ROWS)
    sweep = plan_sweep(tmp_path / "s", rows, 2, only=["E"])
    assert list(sweep.rows) == ["base", "E", "control"]
    pairs = [(run.name, run.config) for run in sweep.runs if run.row == "control"]
    assert pairs == [
        (f"control/seed-{seed}", BASE.change(train={"seed": seed})) for seed in (20_000, 20_001)
    ]
    assert sweep.seeds == [0, 1]
    sweep.store()
    stored = Sweep.open(tmp_path / "s")
    assert stored.rows == sweep.rows
    assert [run.name for run in stored.runs] == [run.name for run in sweep.runs]
    # Adding a seed to a stored sweep also adds one to the control.
    plan_sweep(tmp_path / "s", rows, 3).store()
    assert len(Sweep.open(tmp_path / "s").runs) == 3 * len(rows)


def test_a_sweep_that_was_planned_before_a_value_was_chosen_stores_the_value(
    tmp_path: Path,
) -> None:
    tuning = Tuning("train.learning_rate_scale", (1.0, 2.0), (10_000,))
    rows = {"base": ROWS["base"]}
    first, second = (plan_sweep(tmp_path / "s", rows, n, tuning=tuning) for n in (1, 2))
    first.store()
    first.choose({"base": 2.0}).store()
    second.store()
    files = [run.config_file for run in Sweep.open(tmp_path / "s").runs]
    scales = [json.loads(file.read_text())["train"]["learning_rate_scale"] for file in files]
    assert scales == [2.0, 2.0]


def test_rows_can_be_added_after_values_were_chosen_for_other_rows(tmp_path: Path) -> None:
    tuning = Tuning("train.learning_rate_scale", (1.0, 2.0), (10_000,))
    first, second = (
        plan_sweep(tmp_path / "s", ROWS, 1, only=[row], tuning=tuning) for row in ("wide", "E")
    )
    first.store()
    first.choose({"base": 2.0, "wide": 1.0}).store()
    second.store()
    stored = Sweep.open(tmp_path / "s")
    assert list(stored.rows) == ["base", "wide", "E"]
    assert stored.tuning == replace(tuning, chosen={"base": 2.0, "wide": 1.0})


def test_a_control_uses_the_value_that_was_chosen_for_the_first_row(tmp_path: Path) -> None:
    tuning = Tuning("train.learning_rate_scale", (0.5, 2.0), (10_000,))
    sweep = plan_sweep(tmp_path / "s", with_control(ROWS), 1, tuning=tuning)
    sweep.store()
    assert {run.row for run in sweep.trials} == set(ROWS)
    [control] = [run for run in sweep.runs if run.row == "control"]
    assert not control.config_file.exists()
    sweep = sweep.choose({"base": 2.0, "wide": 0.5})
    sweep.store()
    assert {run.row for run in sweep.runs if run.config_file.exists()} == {
        *("base", "wide", "control")
    }
    [control] = [run for run in sweep.runs if run.row == "control"]
    assert control.config.train.learning_rate_scale == 2


def test_a_control_that_is_added_later_keeps_the_config_of_the_row_that_it_copies(
    tmp_path: Path,
) -> None:
    plan_sweep(tmp_path / "s", {"base": ROWS["base"]}, 1).store()
    added = plan_sweep(tmp_path / "s", with_control({"E": ROWS["E"]}), 1)
    added.store()
    stored = {run.name: run for run in Sweep.open(tmp_path / "s").runs}
    assert [stored[run.name].config for run in added.runs] == [run.config for run in added.runs]
    assert stored["control/seed-20000"].config.model.positions == "learned"


@pytest.mark.parametrize("first", [True, False])
def test_an_ordinary_row_cannot_become_a_control_and_vice_versa(
    first: bool, tmp_path: Path
) -> None:
    plans = [
        {"base": ROWS["base"], "copy": Row(BASE, is_control=control)}
        for control in (first, not first)
    ]
    plan_sweep(tmp_path / "s", plans[0], 1).store()
    assert choose_folder(tmp_path / "s", plans[0]) == tmp_path / "s"
    assert choose_folder(tmp_path / "s", plans[1]) == tmp_path / "s-2"
    with pytest.raises(UsageError, match=f"is {'' if first else 'not '}a control: rename"):
        plan_sweep(tmp_path / "s", plans[1], 1).store()
    assert Sweep.open(tmp_path / "s").rows == plans[0]


def test_a_control_that_copies_no_row_is_an_error() -> None:
    rows = {"base": ROWS["base"], "other": replace(ROWS["E"], is_control=True)}
    message = "^row other is a control, but no other row has the same config$"
    with pytest.raises(UsageError, match=message):
        plan_sweep(Path("s"), rows, 1)


def test_a_sweep_with_a_control_cannot_have_another_row_of_that_name() -> None:
    rows = with_control(ROWS)
    assert with_control(rows) == rows
    with pytest.raises(ConfigError, match="cannot have another row named 'control'"):
        with_control({"base": Row(BASE), "control": ROWS["E"]})


def test_the_path_of_a_sweep_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8: choose another one"):
        plan_sweep(path, {"base": Row(SMALL)}, 1)
    assert not any(tmp_path.iterdir())


def test_a_sweep_needs_a_seed() -> None:
    with pytest.raises(UsageError, match="seeds must be from 1 to 10000, got 0"):
        plan_sweep(Path("s"), ROWS, 0)


def test_a_row_name_must_be_valid_as_a_folder_name() -> None:
    for name in ("..", "a/b", " ", ".hidden", "a b", "-x"):
        with pytest.raises(UsageError, match="a row's name must consist of"):
            plan_sweep(Path("s"), {"base": ROWS["base"], name: ROWS["E"]}, 1)
    # Programs that synchronize folders, such as this package's buckets, skip such names.
    for name in ("wide.part", "A1.bak"):
        with pytest.raises(UsageError, match="must not look like that of a temporary file"):
            plan_sweep(Path("s"), {name: ROWS["base"]}, 1)


def test_a_row_without_a_name_cannot_replace_another_row() -> None:
    assert list(plan_sweep(Path("s"), {"": ROWS["base"]}, 1).rows) == ["run"]
    with pytest.raises(UsageError, match="another row would both be 'run'"):
        plan_sweep(Path("s"), {"": ROWS["base"], "run": ROWS["E"]}, 1)


def test_rows_have_the_number_of_batch_shapes_that_suits_the_first_row(tmp_path: Path) -> None:
    large = SMALL.change(model={"num_layers": 100, "d_ff": 100_000}, train={"steps": 100_000})
    assert large.with_batch_shapes().data.max_batch_shapes == 12
    fixed = SMALL.change(data={"max_batch_shapes": 5})
    rows = {"base": Row(SMALL), "large": Row(large), "fixed": Row(fixed)}
    path = choose_folder(tmp_path / "s", rows)
    sweep = plan_sweep(path, rows, 1)
    sweep.store()
    assert [run.config.data.max_batch_shapes for run in sweep.runs] == [2, 2, 5]
    assert choose_folder(path, rows) == path


def test_a_run_is_found_by_its_name() -> None:
    sweep = plan_sweep(Path("s"), ROWS, 2)
    assert sweep.find("E/seed-1") == sweep.runs[-1]
    with pytest.raises(UsageError, match="s has no run 'E/seed-2'"):
        sweep.find("E/seed-2")


def test_rows_can_be_added_to_a_stored_plan_but_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    two = {name: ROWS[name] for name in ("base", "wide")}
    plan_sweep(path, two, 1).store()
    assert Sweep.open(path).rows == two
    plan_sweep(path, {"base": ROWS["base"], "E": ROWS["E"]}, 2).store()
    grown = Sweep.open(path)
    assert grown.rows == ROWS
    assert grown.seeds == [0, 1]
    changed = {"base": Row(BASE.change(model={"d_ff": 48}))}
    with pytest.raises(UsageError) as error:
        plan_sweep(path, changed, 1).store()
    assert "row base with a different config (model.d_ff 32 -> 48)" in str(error.value)
    assert "--out FOLDER" in format_for_shell(error.value)
    assert Sweep.open(path) == grown


def test_rows_that_several_commands_add_at_once_are_all_kept(tmp_path: Path) -> None:
    names = [f"E{number}" for number in range(12)]

    def add(name: str) -> None:
        plan_sweep(tmp_path / "s", {"base": ROWS["base"], name: ROWS["E"]}, 1).store()

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(add, names))
    assert set(Sweep.open(tmp_path / "s").rows) == {"base", *names}


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_rows_that_two_machines_add_at_once_to_a_sweep_in_a_bucket_are_all_kept(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = server.url("sweep")
    plans: list[Sweep] = []
    for name in ("E", "F"):
        monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / name))
        # Neither machine sees the rows of the other one yet.
        plans.append(plan_sweep(local_path(url), {"base": ROWS["base"], name: ROWS["E"]}, 1))
    for name, plan in zip(("E", "F"), plans, strict=True):
        monkeypatch.setenv("TRANSFORMER_JAX_CACHE", str(tmp_path / name))
        plan.store()
    assert set(Sweep.open(plans[-1].path).rows) == {"base", "E", "F"}
    assert any("lease/1.json" in x for x in server.weather.writes)


def test_sweeps_with_other_configs_get_other_folders(tmp_path: Path) -> None:
    path = tmp_path / "v1.5"
    small = {name: Row(row.config.change(model={"d_ff": 16})) for name, row in ROWS.items()}
    first = {"base": ROWS["base"]}
    assert choose_folder(path, first) == path
    plan_sweep(path, first, 1).store()
    # Rows can be added to a sweep if its existing rows keep their configs.
    assert choose_folder(path, ROWS) == path
    assert choose_folder(path, small) == tmp_path / "v1.5-2"
    plan_sweep(tmp_path / "v1.5-2", small, 1).store()
    assert choose_folder(path, small) == tmp_path / "v1.5-2"
    assert choose_folder(path, {"wide": ROWS["wide"]}) == tmp_path / "v1.5-3"


def test_a_plan_records_each_command_that_made_it_once(tmp_path: Path) -> None:
    first, second = Origin("transformer-jax sweep mine", "0123"), Origin("sweep mine --seeds 2", "")
    sweep = plan_sweep(tmp_path / "s", ROWS, 1)
    for origin in (first, second, first):
        replace(sweep, origins=[origin]).store()
    assert Sweep.open(tmp_path / "s").origins == [first, second]


def test_a_plan_without_commands_is_valid(tmp_path: Path) -> None:
    plan_sweep(tmp_path / "s", ROWS, 1).store()
    file = tmp_path / "s" / "sweep.json"
    plan = read_json(file)
    del plan["origins"]
    write_json(file, plan)
    assert Sweep.open(tmp_path / "s").rows == ROWS


def test_a_sweep_can_be_stored_in_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").touch()
    assert choose_folder(tmp_path, ROWS) == tmp_path
    plan_sweep(tmp_path, ROWS, 1).store()
    assert Sweep.open(tmp_path).rows == ROWS


def test_a_folder_without_a_valid_plan_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a sweep: it has no sweep\.json"):
        Sweep.open(tmp_path)
    invalid_row = json.dumps({"format": FORMAT, "rows": {"..": {}}})
    infinite_seed = json.dumps({"format": FORMAT, "rows": {}, "seeds": [math.inf]})
    for content in ("", "[]", "{}", invalid_row, infinite_seed, "[" * 100_000):
        (tmp_path / "sweep.json").write_text(content)
        with pytest.raises((StorageError, UsageError), match=r"sweep\.json|a row's name"):
            Sweep.open(tmp_path)


def test_a_plan_in_an_older_format_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"format": 1, "rows": {}, "seeds": [0]}')
    with pytest.raises(StorageError, match=r"sweep\.json has format 1, but .* reads format 2$"):
        Sweep.open(tmp_path)


@pytest.mark.usefixtures("forget_parts")
def test_a_sweep_whose_parts_are_not_registered_names_the_file_to_import(tmp_path: Path) -> None:
    for name in ("once", "twice"):
        code = f'transformer_jax.register("model.activation", "{name}")(lambda x: x)'
        (tmp_path / f"{name}.py").write_text(f"import transformer_jax\n{code}\n")
        import_file(str(tmp_path / f"{name}.py"))
    rows = {"base": Row(BASE)}
    rows |= {x: Row(BASE.change(model={"activation": x})) for x in ("once", "twice")}
    plan_sweep(tmp_path / "s", rows, 1).store()
    assert Sweep.open(tmp_path / "s").rows == rows
    messages = {
        "twice": "model.activation 'twice', which twice.py registers",
        "once": "model.activation 'once', model.activation 'twice', which once.py and twice.py",
    }
    for name, message in messages.items():
        del registry._parts["model.activation"][name]
        with pytest.raises(UsageError) as error:
            Sweep.open(tmp_path / "s")
        assert error.value.exit_code == 2
        assert str(error.value).startswith(f"{tmp_path / 's'} uses {message}")
