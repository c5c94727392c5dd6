"""Test that runs resume bit for bit with any optimizer, schedule, or loss, even a custom one."""

import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from example_configs import SMALL, metrics_of
from training_runs import QUIET, assert_same, resume, signal_at_step, state_of, train

import transformer_jax
from transformer_jax import registry
from transformer_jax.config import Config
from transformer_jax.config.loading import IMPORTS, import_file
from transformer_jax.errors import ConfigError, RunInterrupted
from transformer_jax.evaluation.perplexity import perplexity, score_sentences, scoring_batches
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.components import build_run_components
from transformer_jax.training.create_run import create_run

FOREIGN = """
import jax.numpy as jnp
import optax
from transformer_jax import Loss, register

@register("train.schedule", "halving")
def halving(config, peak):
    return lambda step: peak * 0.5 ** (step / config.warmup_steps)

@register("train.optimizer", "momentum")
def momentum(config, rate):
    return optax.sgd(rate, momentum=config.adam_beta1)

@register("train.loss", "squared")
def squared(logits, target, config):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), target)
    sums = (jnp.sum(values, where=target != 0) for values in (nll**2, nll, jnp.ones(nll.shape)))
    return Loss(*sums)
"""

SCHEDULE_FREE = {"optimizer": "schedule_free", "schedule": "constant"}
VARIANTS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "z_loss": 1e-4},
    {"optimizer": "lion", "schedule": "warmup_stable_decay", "peak_learning_rate": 1e-4},
    {"optimizer": "adafactor", "gradient_accumulation_steps": 2},
    {"optimizer": "muon", "weight_decay": 0.1, "clip_norm": 1.0},
    {**SCHEDULE_FREE, "clip_norm": 1.0},
    {"optimizer": "adam", "ema_decay": 0.5, "base_width": 4, "base_d_k": 4},
]


def check_exact_resumption(config: Config, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Interrupt and resume a run. Return an otherwise identical run that was not interrupted."""
    whole = train(config, folder / "whole")
    with patch.context() as context:
        signal_at_step(context, 3, signal.SIGTERM)
        with pytest.raises(RunInterrupted):
            train(config, folder / "run")
    resume(folder / "run")
    assert_same(state_of(folder / "run"), state_of(whole))
    assert metrics_of(folder / "run") == metrics_of(whole)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: changes["optimizer"])
def test_a_run_resumes_to_the_same_bits_with_every_optimizer(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SMALL.change(train=changes)
    whole = check_exact_resumption(config, tmp_path, monkeypatch)
    losses = [line["loss"] for line in metrics_of(whole) if line["split"] == "train"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_foreign_parts_train_and_resume_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IMPORTS, "")
    (tmp_path / "parts.py").write_text(FOREIGN)
    import_file(str(tmp_path / "parts.py"))
    parts = {"schedule": "halving", "optimizer": "momentum", "loss": "squared"}
    config = SMALL.change(train={**parts, "peak_learning_rate": 0.1})
    path = check_exact_resumption(config, tmp_path, monkeypatch)
    reports = [line for line in metrics_of(path) if line["split"] == "train"]
    assert reports[0]["learning_rate"] == pytest.approx(0.1 * 0.5 ** (2 / 4))
    # The mean of the squares is at least the square of the mean.
    assert all(line["loss"] > np.log(line["perplexity"]) ** 2 for line in reports)
    with pytest.raises(ConfigError, match="cannot resume with a different train"):
        resume(path, train={"steps": 9})
    for field, name in parts.items():
        del registry._parts[f"train.{field}"][name]
    registry._digests.clear()


@pytest.mark.slow
def test_schedule_free_runs_score_store_and_load_the_evaluation_parameters(tmp_path: Path) -> None:
    path = train(SMALL.change(train=SCHEDULE_FREE), tmp_path / "run")
    _, arrays = state_of(path)
    run = transformer_jax.load(path, average_checkpoints=1)
    assert_same(run.params, arrays["params"])
    # The average x is between the last iterate z and the training parameters y.
    state, training = arrays["optimizer"]
    x, y, z = (
        arrays["params"]["embedding"]["table"],
        *(tree["embedding"]["table"] for tree in (training, state.z)),
    )
    np.testing.assert_allclose(y, 0.9 * x + 0.1 * z, atol=1e-6)
    assert abs(x - y).max() > 1e-3
    components = build_run_components(RunFolder.open(path))
    batches = scoring_batches(*components.prepared.tokens("dev"))
    scores = score_sentences(components.model, run.params, batches)
    reports = [line for line in metrics_of(path) if line["split"] == "dev"]
    assert reports[-1]["perplexity"] == pytest.approx(perplexity(scores), rel=1e-6)
    # A new run that begins with these parameters trains from them, and not from random values.
    start = create_run(SMALL.change(train=SCHEDULE_FREE), tmp_path / "new", QUIET, init_from=path)
    _, initial = state_of(start.path)
    for tree in (initial["params"], initial["optimizer"].params, initial["optimizer"].state.z):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), tree, arrays["params"]
        )


@pytest.mark.slow
def test_only_decay_steps_lets_a_decaying_schedule_resume_with_more_steps(tmp_path: Path) -> None:
    fields = {"schedule": "cosine", "steps": 4}
    short = RunFolder.open(train(SMALL.change(train={**fields, "warmup_steps": 2}), tmp_path / "a"))
    with pytest.raises(
        ConfigError, match=r"train\.schedule, cosine, ends at step 4: set train\.decay"
    ):
        short.with_config(short.config.change(train={"steps": 8}))
    config = SMALL.change(train={**fields, "decay_steps": 8})
    path = train(config, tmp_path / "b")
    copy = Path(shutil.copytree(path, tmp_path / "c"))
    resume(copy, train={"steps": 8})
    whole = train(config.change(train={"steps": 8}), tmp_path / "whole")
    assert_same(state_of(copy), state_of(whole))
