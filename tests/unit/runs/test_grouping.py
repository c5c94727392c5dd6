"""Test that runs that differ only in their seeds form groups with distinct labels."""

from pathlib import Path

import pytest
from example_configs import SMALL
from run_files import make_run

from transformer_jax.config import Config
from transformer_jax.errors import UsageError
from transformer_jax.runs.grouping import group_runs
from transformer_jax.runs.run_folder import RunFolder


def make_folder(path: Path, config: Config = SMALL, seed: int = 0) -> RunFolder:
    return RunFolder.open(make_run(path, config.change(train={"seed": seed})))


def test_a_group_has_the_name_of_its_first_run_or_of_its_row(tmp_path: Path) -> None:
    wide = SMALL.change(model={"d_ff": 48})
    first = make_folder(tmp_path / "first")
    in_sweep = make_folder(tmp_path / "wide" / "seed-0", wide)
    again = make_folder(tmp_path / "again", seed=7)
    assert group_runs([first, in_sweep, again]) == {"first": (first, again), "wide": (in_sweep,)}


def test_a_group_whose_name_is_taken_has_its_path_as_the_label(tmp_path: Path) -> None:
    one = make_folder(tmp_path / "a" / "run")
    other = make_folder(tmp_path / "b" / "run", SMALL.change(model={"d_ff": 48}))
    assert list(group_runs([one, other])) == ["run", str(other.path)]


def test_a_run_cannot_be_listed_twice(tmp_path: Path) -> None:
    make_folder(tmp_path / "run")
    paths = (tmp_path / "run", tmp_path / "x" / ".." / "run")
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError, match="a run is listed twice"):
        group_runs([RunFolder.open(path) for path in paths])


def test_runs_with_different_vocabularies_cannot_be_compared(tmp_path: Path) -> None:
    one = make_folder(tmp_path / "one")
    other = make_folder(tmp_path / "other", SMALL.change(data={"vocab_size": 80}))
    with pytest.raises(UsageError, match=r"other and .*one were trained on different text"):
        group_runs([one, other])
