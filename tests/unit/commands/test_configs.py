"""Test the `params` and `diff` commands."""

import json
from pathlib import Path

import pytest
from example_configs import SMALL
from processes import counts, mistake

from transformer_jax.cli import main
from transformer_jax.data.prepare import prepare_text
from transformer_jax.files import DIGEST
from transformer_jax.runs.run_folder import RunFolder

# Parameters


@pytest.mark.parametrize(
    "name", ["tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in ("base", "big"))]
)
def test_the_parameters_of_the_modules_add_up_to_the_total(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = counts(capsys, name)
    total = modules.pop("total")
    assert sum(modules.values()) == total
    assert main(["params", name]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert printed == {name: f"{count:,}" for name, count in {**modules, "total": total}.items()}


def test_the_base_model_has_as_many_parameters_as_its_equations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    d_model, d_ff, layers, vocabulary = 512, 2048, 6, 37_000
    attention = 4 * d_model * d_model
    feed_forward = 2 * d_model * d_ff + d_ff + d_model
    norm = 2 * d_model
    encoder = layers * (attention + feed_forward + 2 * norm)
    decoder = layers * (2 * attention + feed_forward + 3 * norm)
    assert counts(capsys, "base")["total"] == vocabulary * d_model + encoder + decoder


def test_params_prints_each_row_of_a_sweep_next_to_the_papers_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep = tmp_path / "three.py"
    sweep.write_text(
        "from configs.table3 import SWEEP as TABLE3\n"
        "SWEEP = {name: TABLE3[name] for name in ('base', 'B1', 'E')}\n"
    )
    # A single layer keeps this test fast.
    arguments = [str(sweep), "--model.num-layers", "1"]
    assert main(["params", *arguments]) == 0
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[:2] == ["row", "parameters"]
    totals = {name: f"{row['total']:,}" for name, row in counts(capsys, *arguments).items()}
    assert [tuple(line[:2]) for line in lines] == list(totals.items())
    # The paper gives parameter counts for rows base and B1, but not for row E.
    assert [line[4:] for line in lines] == [["65", "+0"], ["58", "-7"], []]


# Differences


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (("table3:A1", "base"), ["model.num_heads", "model.d_k", "model.d_v"]),
        (("table3:D3", "base"), ["train.label_smoothing"]),
        (("base", "base"), []),
    ],
)
def test_diff_names_the_fields_that_differ(
    names: tuple[str, str], fields: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *names, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == fields
    assert main(["diff", *names]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in fields or ["no difference"])


def test_diff_finds_a_shipped_config_next_to_a_folder_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["diff", "base", "big"]) == 0
    assert "model.d_model" in capsys.readouterr().out


def test_diff_of_runs_names_the_software_versions_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = prepare_text(SMALL.data)
    for name, seed in (("a", 0), ("b", 1)):
        config = SMALL.change(train={"seed": seed})
        RunFolder.create(tmp_path / name, config, prepared.vocabulary, prepared.fingerprint)
    description = tmp_path / "b" / "run.json"
    stored = json.loads(description.read_text())
    del stored[DIGEST]  # As the error message advises after a change by hand.
    stored["versions"] |= {"jax": "0.0.1", "added": "2"}
    description.write_text(json.dumps(stored))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    differences = json.loads(capsys.readouterr().out)
    assert set(differences) == {"train.seed", "made with jax", "made with added"}
    assert differences["made with jax"][1] == "0.0.1"
    assert differences["made with added"] == [None, "2"]
    assert f"{tmp_path} is not a run" in mistake(
        capsys, ["diff", str(tmp_path / "a"), str(tmp_path)]
    )
