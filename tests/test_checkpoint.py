from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import StorageError, UsageError
from transformer_jax.runs.checkpoint import Checkpoints, on_device

IDENTITY = {"model.d_model": 2, "data": "f1a9"}
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def params_of(step: int) -> dict[str, Any]:
    return {"layer": {"kernel": jnp.full((3, 2), float(step)), "bias": jnp.arange(2.0) + step}}


def arrays(params: Any) -> dict[str, Any]:
    return {"params": params, "optimizer": {"count": jnp.int32(7)}}


def save(folder: Path, steps: dict[int, float | None], keep: int = 3) -> None:
    """Write a checkpoint for each step, with its perplexity where it is scheduled."""
    with Checkpoints(folder, IDENTITY, keep=keep) as checkpoints:
        for step, perplexity in steps.items():
            checkpoints.save(step, arrays(params_of(step)), perplexity, {})


def kept(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = {"w": jax.random.normal(jax.random.key(0), (64, 3)), "i": jnp.int32(7)}
    with Checkpoints(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(5, arrays(saved), 1.5, {"unreported": [[0.1, 2.0]]})
    with Checkpoints(tmp_path / "c", IDENTITY) as checkpoints:
        assert checkpoints.latest_good() == 5
        assert checkpoints.notes(5) == {"unreported": [[0.1, 2.0]]}
        found = checkpoints.restore(5, {"params": on_device(saved, HERE)})
    assert set(found) == {"params"}  # the optimizer was not read
    jax.tree.map(np.testing.assert_array_equal, found["params"], saved)


def test_arrays_may_be_given_away_as_soon_as_save_returns(tmp_path: Path) -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1_000_000)
    with Checkpoints(tmp_path / "c", IDENTITY, keep=1) as checkpoints:
        checkpoints.save(1, arrays({"x": x}), None, {})
        for _ in range(20):
            x = add(x)
        found = checkpoints.restore(1, {"params": on_device({"x": x}, HERE)})
    assert float(jnp.abs(found["params"]["x"]).max()) == 0


def test_the_latest_the_best_and_the_last_few_scheduled_stay(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 2.0, 2: 9.0, 3: 8.0, 4: 7.0, 5: None, 6: 6.0, 7: None}, keep=2)
    # 1 is the best, 4 and 6 the last two scheduled, 7 the latest.
    assert kept(tmp_path / "c") == {1, 4, 6, 7}


def test_an_average_is_of_scheduled_checkpoints_only(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0, 2: 8.0, 3: None, 4: 7.0, 5: None})
    target = on_device(params_of(0), HERE)
    with Checkpoints(tmp_path / "c", IDENTITY) as checkpoints:
        assert sorted(checkpoints.scores) == [1, 2, 4]
        mean = checkpoints.mean_params(checkpoints.choose(2), target)
        np.testing.assert_allclose(mean["layer"]["kernel"], 3.0)
        np.testing.assert_allclose(mean["layer"]["bias"], [3.0, 4.0])
        with pytest.raises(UsageError, match=r"mean of 4 .* has 3"):
            checkpoints.choose(4)


def test_what_is_meant_ends_at_the_step_that_is_named(tmp_path: Path) -> None:
    save(tmp_path / "run" / "c", {1: 9.0, 2: 8.0, 3: None, 4: 7.0, 5: None}, keep=3)
    with Checkpoints(tmp_path / "run" / "c", IDENTITY) as checkpoints:
        # An interruption's own checkpoint, of step 3, went when that of step 4 came.
        assert checkpoints.choose() == checkpoints.choose(step=5) == [5]
        assert checkpoints.choose(step=2) == [2]
        assert checkpoints.choose(2) == checkpoints.choose(2, step=4) == [2, 4]
        assert checkpoints.choose(2, step=2) == [1, 2]
        with pytest.raises(UsageError, match=r"run has no checkpoint of step 3; .*: 1, 2, 4, 5$"):
            checkpoints.choose(step=3)
        with pytest.raises(UsageError, match=r"no scheduled checkpoint of step 5; .*: 1, 2, 4$"):
            checkpoints.choose(2, step=5)
        with pytest.raises(UsageError, match=r"mean of 3 .* has 2 scheduled ones up to step 2"):
            checkpoints.choose(3, step=2)


def test_a_run_without_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint yet"):
        Checkpoints(tmp_path / "run" / "checkpoints", IDENTITY)


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    save(tmp_path / "c", {1: 9.0, 2: 8.0})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")}
    with Checkpoints(tmp_path / "c", IDENTITY) as checkpoints:
        checkpoints.restore(2, {"params": on_device(params_of(0), HERE)})
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")} == before


@pytest.mark.parametrize(
    "other",
    [
        {"layer": {"kernel": jnp.zeros((3, 9)), "bias": jnp.zeros(2)}},
        {"layer": {"kernel": jnp.zeros((3, 2))}, "more": jnp.zeros(1)},
        {"layer": {"kernel": jnp.zeros((3, 2), jnp.bfloat16), "bias": jnp.zeros(2)}},
    ],
    ids=["shape", "names", "dtype"],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, other: dict[str, Any]) -> None:
    save(tmp_path / "c", {1: 9.0})
    with Checkpoints(tmp_path / "c", IDENTITY) as checkpoints:
        with pytest.raises(StorageError, match="checkpoint 1") as caught:
            checkpoints.restore(1, {"params": on_device(other, HERE)})
        assert "\n" not in str(caught.value)
